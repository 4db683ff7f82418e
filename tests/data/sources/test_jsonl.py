"""JSON Lines: what is read of them, and what of them cannot be."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from daguerre.data.sources import jsonl
from daguerre.data.tools import detect
from daguerre.errors import UserError
from daguerre.settings import ROOTS


@pytest.fixture
def folder(tmp_path):
    for number, name in enumerate("abc"):
        Image.new("RGB", (16, 16), (90 * number, 0, 0)).save(tmp_path / f"{name}.png")
    return tmp_path


def opened(path, **given):
    return jsonl.open_source(jsonl.Settings(path=str(path), resolution=16, held_out_fraction=0, **given), "train")


def write(folder, *lines: object, name="set.jsonl", end="\n"):
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    (folder / name).write_bytes(end.encode().join(texts))
    return folder / name


@pytest.mark.parametrize(("start", "end"), [("", "\n"), ("\ufeff", "\n"), ("", "\r\n"), ("", "\n\n")])
def test_a_line_is_a_row(folder, start, end):
    rows = ({"path": f"{name}.png", "text": f"über {name}", "score": 3, "tags": ["x"]} for name in "abc")
    path = write(folder, *rows, end=end)
    path.write_bytes(start.encode() + path.read_bytes())
    source = opened(path)
    records = [source.record(number) for number in range(source.index.count)]
    assert [record.texts["text"] for record in records] == ["über a", "über b", "über c"]
    assert records[1].metadata == {"score": 3, "tags": '["x"]'}
    assert records[1].image == (folder / "b.png").read_bytes()
    assert source.name(1) == f"{folder}/set.jsonl line {len(end.splitlines()) + 1}"


def test_what_is_no_row_is_counted_with_its_line(folder):
    good = [{"path": f"{name}.png", "text": name} for name in "abc"]
    long = b'{"path": "a.png", "text": "' + b"x" * (3 << 20) + b'"}'
    wrong = [b"{", b"[1]", b'{"path": "a.png", "text": "\xff"}', long, b'{"path": "a.png", "text": "\\ud800"}']
    source = opened(
        write(folder, good[0], *wrong, {"path": "b.png"}, {"text": "x"}, *good[1:], {"path": 3, "text": "x"})
    )
    assert source.index.count == 3
    assert [source.record(number).texts["text"] for number in range(3)] == ["a", "b", "c"]
    counts = {reason: (own["count"], own["examples"]) for reason, own in source.report().items()}
    found = {
        "line that is not a JSON object in UTF-8": [2, 3, 4, 5, 6],
        "no caption (column 'text')": [7],
        "no image: the cell is empty": [8],
        "there is no image file at the path": [11],
    }
    for reason, numbers in found.items():
        assert counts[reason][0] == len(numbers)
        assert [int(name.rpartition(" ")[2]) for name in counts[reason][1]] == numbers


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b'[{"path": "a.png"}]', "begins with a JSON list"),
        (b"path,text\na.png,x\n", "begins with 'path,text"),
        (b"{}\n", "must be a JSON object"),
        (b"PK\x03\x04", "compressed or binary"),
    ],
)
def test_what_is_no_such_file(folder, content, said):
    (folder / "set.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=said):
        opened(folder / "set.jsonl")


def test_a_file_that_changed_is_not_read_as_another_row(folder):
    path = write(folder, *({"path": f"{name}.png", "text": name} for name in "abc"))
    source = opened(path)
    path.write_bytes(path.read_bytes().replace(b'"text": "b"', b'"text": "c"'))
    with pytest.raises(Exception, match="bytes differ from the index"):
        source.record(1)


def test_it_is_found_by_its_name_but_not_in_a_folder_of_images(folder):
    path = write(folder, {"path": "a.png", "text": "a"})
    assert detect.kind([str(path)]) == "jsonl"
    path.rename(folder / "metadata.jsonl")
    assert detect.kind([str(folder)]) == "folder"


def test_cells_lead_a_queued_run_no_further_than_its_folders(folder, tmp_path_factory, monkeypatch):
    away = tmp_path_factory.mktemp("away")
    (folder / "a.png").rename(away / "a.png")
    (folder / "link.png").symlink_to(away / "a.png")
    places = [str(away / "a.png"), "link.png", f"../{away.name}/a.png", "http://10.0.0.1/a.png", "b.png"]
    path = write(folder, *({"path": place, "text": "x"} for place in places))
    assert opened(path).index.count == 5
    monkeypatch.setenv(ROOTS, json.dumps([str(folder)]))
    path = write(folder, *({"path": place, "text": "y"} for place in places))
    source = opened(path)
    assert source.index.count == 1
    assert source.report()["a path or an address that this run may not read"]["count"] == 4


def test_a_table_that_is_a_link_is_not_read_by_a_queued_run(folder, tmp_path_factory, monkeypatch):
    away = write(tmp_path_factory.mktemp("away"), {"path": "b.png", "text": "x"})
    (folder / "link.jsonl").symlink_to(away)
    monkeypatch.setenv(ROOTS, json.dumps([str(folder)]))
    with pytest.raises(UserError, match="leads out of the folders that this run may read"):
        opened(folder / "link.jsonl")
