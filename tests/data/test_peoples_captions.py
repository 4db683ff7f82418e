"""Captions and archives as people have them, through every source: lists of captions, JSON, what programs leave."""

import csv
import json
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tars
from PIL import Image

from daguerre import plugins
from daguerre.cli import main
from daguerre.data.index import file as index_file
from daguerre.data.leftovers import LEFTOVER


@pytest.mark.parametrize("listed", [["a cat", "a pet", "fur"], ["one"]])
def test_a_list_of_captions_is_packed_and_read_as_a_list(tmp_path, listed):
    """From metadata.jsonl, JSON Lines, parquet and a tar, whose samples are then packed."""
    (tmp_path / "folder").mkdir()
    Image.fromarray(np.full((20, 20, 3), 9, np.uint8)).save(tmp_path / "folder" / "a.png")
    image = (tmp_path / "folder" / "a.png").read_bytes()
    line = {"file_name": "a.png", "text": listed}
    (tmp_path / "folder" / "metadata.jsonl").write_text(json.dumps(line))
    (tmp_path / "lines.jsonl").write_text(json.dumps({**line, "file_name": "folder\\a.png"}))
    pq.write_table(pa.table({"image": [image], "captions": [listed]}), tmp_path / "a.parquet")
    tars.write(tmp_path / "a.tar", [("x.png", image), ("x.json", json.dumps({"captions": listed}).encode())])
    expected = {f"text.{i}" if i else "text": text for i, text in enumerate(listed)}
    paths = {"folder": "folder", "jsonl": "lines.jsonl", "parquet": "a.parquet", "webdataset": "a.tar"}
    for kind, path in paths.items():
        found = plugins.find("sources", kind)
        own = found.Settings(path=str(tmp_path / path), cache_dir=str(tmp_path / "cache"))
        texts = found.open_source(own, "train").record(0).texts
        assert {name: text for name, text in texts.items() if name.startswith("text")} == expected, kind
        assert main.run(["data", "pack", str(tmp_path / path), "-o", str(tmp_path / kind / "packed")]) == 0
        shards = plugins.find("sources", "webdataset")
        packed = shards.open_source(shards.Settings(path=str(tmp_path / kind / "packed")), "train").record(0).texts
        assert {name: text for name, text in packed.items() if name.startswith("text")} == expected, kind


@pytest.mark.parametrize("text", [{"en": "a"}, [1, 2], [["a"]], [], {}])
def test_a_caption_that_is_json_of_another_kind_is_never_trained(tmp_path, text):
    Image.fromarray(np.full((20, 20, 3), 9, np.uint8)).save(tmp_path / "a.png")
    lines = [{"file_name": "a.png", "text": text}, {"file_name": "a.png", "text": "[sic] a cat"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    jsonl = plugins.find("sources", "jsonl")
    source = jsonl.open_source(jsonl.Settings(path=str(tmp_path), cache_dir=str(tmp_path / "cache")), "train")
    assert source.index.count == 1
    assert source.record(0).texts == {"text": "[sic] a cat"}
    assert source.report()["caption that is a JSON object, or a list with other things than texts"]["count"] == 1


@pytest.mark.parametrize(
    "name", ["__MACOSX/x/._a.jpg", "set/._a.jpg", "./._a.txt", ".DS_Store", "@eaDir/b/c.jpg", "x/Thumbs.db"]
)
def test_what_programs_leave_in_archives_is_left_out(tmp_path, name):
    members = [(name, tars.jpeg(7)), *tars.sample("set/a", 0)]
    if name.startswith("@"):
        members.insert(1, ("@eaDir/b/c.txt", b"a small copy"))
    tars.write(tmp_path / "a.tar", members)
    shards = plugins.find("sources", "webdataset")
    source = shards.open_source(shards.Settings(path=str(tmp_path), cache_dir=str(tmp_path / "cache")), "train")
    assert source.index.count == 1
    assert [*source.report()] == [LEFTOVER]


_LISTS = {  # what a cell or file holds: the captions it gives, or a word of the reason for which it gives none
    '["a cat", "a pet"]': ["a cat", "a pet"],
    ' ["a cat"]': ["a cat"],
    "['a cat', 'a pet']": "Python",
    "['a cat' 'a pet']": "Python",
    "('a cat', 'a pet')": "Python",
    '["a cat", 1]': "JSON object",
    '{"en": "a cat"}': "JSON object",
    "[sic] a cat's 'bed'": ["[sic] a cat's 'bed'"],
    "(masterpiece), 'a cat'": ["(masterpiece), 'a cat'"],
    "{a|b} cat": ["{a|b} cat"],
    "[1girl, 'solo'": ["[1girl, 'solo'"],
}


@pytest.mark.parametrize("cell", _LISTS)
def test_the_text_of_a_list_is_several_captions_or_none_wherever_it_stands(tmp_path, cell):
    """Never trained as it is written: in tables, caption files, metadata.jsonl, and members and JSON of tars."""
    expected, other = _LISTS[cell], tars.jpeg(2)
    for name, data in {"a.jpg": tars.jpeg(1), "a.txt": cell.encode(), "b.jpg": other, "b.txt": b"b"}.items():
        for folder in ("files", "lines"):
            (tmp_path / folder).mkdir(exist_ok=True)
            if folder == "files" or name.endswith("jpg"):
                (tmp_path / folder / name).write_bytes(data)
    rows = [{"file_name": f"files/{name}.jpg", "text": text} for name, text in (("a", cell), ("b", "b"))]
    lines = [json.dumps({**row, "file_name": row["file_name"].removeprefix("files/")}) for row in rows]
    (tmp_path / "lines" / "metadata.jsonl").write_text("\n".join(lines))
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "r.parquet")
    for name, between in (("r.csv", ","), ("r.tsv", "\t")):
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file, delimiter=between).writerows([["file_name", "text"], *(row.values() for row in rows)])
    for name, part in {"t.tar": ("a.txt", cell.encode()), "j.tar": ("a.json", lines[0].encode())}.items():
        tars.write(tmp_path / name, [("a.jpg", tars.jpeg(1)), part, *tars.sample("b", 2, "b")])
    read = {"folder": ["files", "lines"], "jsonl": ["r.jsonl"], "csv": ["r.csv", "r.tsv"], "parquet": ["r.parquet"]}
    for kind, paths in {**read, "webdataset": ["t.tar", "j.tar"]}.items():
        for path in paths:
            found = plugins.find("sources", kind)
            own = found.Settings(path=str(tmp_path / path), cache_dir=str(tmp_path / "cache"))
            source = found.open_source(own, "train")
            each = [source.record(i).texts for i in range(source.index.count)]
            told = [[texts[name] for name in sorted(texts) if re.fullmatch(r"text(\.\d)?", name)] for texts in each]
            if isinstance(expected, list):
                assert told == [expected, ["b"]], path
            else:
                assert told[-1] == ["b"], path
                assert all(texts == [] for texts in told[:-1]), path
                assert path in ("lines", "j.tar") or any(expected in reason for reason in source.report()), path


@pytest.mark.parametrize(
    ("part", "data"),
    [("json", {"prompt": "a cat"}), ("json", {"text": "", "txt": "a cat"}), ("caption", "a cat"), ("prompt", "a cat")],
)
def test_a_tar_has_its_captions_by_the_names_of_other_sources(tmp_path, part, data):
    """An index of an older version, which does not know them as captions, finds them, too."""
    told = data if isinstance(data, str) else json.dumps(data)
    tars.write(tmp_path / "a.tar", [("a.jpg", tars.jpeg(1)), (f"a.{part}", told.encode()), *tars.sample("b", 2)])
    shards = plugins.find("sources", "webdataset")
    source = shards.open_source(shards.Settings(path=str(tmp_path), cache_dir=str(tmp_path / "cache")), "train")
    assert source.record(0).texts["text"] == "a cat"
    (path,) = source.paths
    before = index_file.load(path)
    mask = pa.array([False, True])
    column = before.table.schema.get_field_index("c:text")
    index_file.save(replace(before, table=before.table.set_column(column, "c:text", mask)), path)
    old = shards.open_source(shards.Settings(path=str(tmp_path), cache_dir=str(tmp_path / "cache")), "train")
    assert old.index.captioned["text"].to_pylist() == [True, True]
