"""Parquet files: which columns are read, what is left out and counted, damage, and memory."""

import io
import json
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faulty_store import Faults, faulty_s3, s3, web_server  # noqa: F401 - fixtures
from PIL import Image
from pydantic import ValidationError
from reading import chosen_records

from daguerre.data.dataset import open_dataset
from daguerre.data.images.headers import Undecodable
from daguerre.data.sources import parquet
from daguerre.data.table import parquet as table_parquet
from daguerre.data.table import verbatim
from daguerre.errors import UserError
from daguerre.storage import io as storage_io


def png(i, height=20, width=30):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(i).integers(0, 256, (height, width, 3), np.uint8)).save(file, "png")
    return file.getvalue()


def settings(path, **given):
    return parquet.Settings(path=path if isinstance(path, list) else str(path), **{"resolution": 16, **given})


def opened(path, **given):
    return parquet.open_source(settings(path, **given), "train")


def write(path, columns, **given):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, path, **given)
    return path


def usual(n=6):
    return {"jpg": [png(i) for i in range(n)], "caption": [f"image {i}" for i in range(n)]}


def records(source):
    return [source.record(i) for i in range(source.index.count)]


def counts(source):
    """What is left out; notes aside."""
    return {
        reason: (entry["count"], [example.rpartition("/")[2] for example in entry["examples"]])
        for reason, entry in source.report().items()
        if not entry["kept"]
    }


def notes(source):
    return [reason for reason, entry in source.report().items() if entry["kept"]]


def test_img2dataset_parquet(tmp_path):
    """As its output format `parquet` writes them: rows that failed have no image."""
    about = {
        "url": [f"http://x/{i}.jpg" for i in range(6)],
        "key": [f"{i:09}" for i in range(6)],
        "status": ["success", "failed_to_download", *["success"] * 4],
        "error_message": pa.array([None, "HTTP Error 404", None, None, None, None], pa.string()),
        "width": pa.array([30, None, 30, 30, 30, 30], pa.int32()),
        "original_width": pa.array([300, None, 300, 300, 300, 300], pa.int32()),
        "exif": ["{}" * 40] * 6,
        "NSFW": pa.array([None] * 6, pa.null()),
    }
    columns = {**usual(), **about}
    columns["jpg"][1] = None
    write(tmp_path / "00000.parquet", columns, row_group_size=2)
    (tmp_path / "00000_stats.json").write_text("{}")
    source = opened(tmp_path)
    assert [r.texts for r in records(source)] == [{"text": f"image {i}"} for i in (0, 2, 3, 4, 5)]
    assert [r.image for r in records(source)] == [png(i) for i in (0, 2, 3, 4, 5)]
    assert source.record(0).metadata["original_width"] == 300
    assert set(source.record(0).metadata) == {*about, "exif"} - {"NSFW"}
    assert counts(source) == {"no image: the cell is empty": (1, ["00000.parquet row 1"])}
    assert notes(source) == ["columns chosen by type and name: images from 'jpg', captions from 'caption'"]
    assert source.name(1) == f"{tmp_path}/00000.parquet row 2"
    assert source.index.numbers["original_width"].to_pylist() == [300.0] * 5
    assert source.index.texts["status"].to_pylist() == ["success"] * 5
    assert "exif" not in source.index.texts
    assert (source.index.heights_px.tolist(), source.index.widths_px.tolist()) == ([20] * 5, [30] * 5)


def test_filters_see_the_other_columns(tmp_path):
    columns = {**usual(), "score": [0.1 * i for i in range(6)], "kind": list("ababab")}
    path = write(tmp_path / "a.parquet", columns)
    data = open_dataset(settings(path, filters="score > 0.15 and kind == 'a'", held_out_fraction=0), "train")
    assert [record.texts["text"] for record in chosen_records(data)] == ["image 2", "image 4"]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([png(0)], pa.binary()),
        pa.array([png(0)], pa.large_binary()),
        pa.array([{"bytes": png(0), "path": "x.png"}], pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        pa.array([{"bytes": None, "path": "0.png"}], pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        pa.array(["0.png"], pa.string()),
        pa.array(["0.png"], pa.large_string()),
        pa.array(["0.png"]).dictionary_encode(),
        pa.array(["FOLDER/0.png"]),
        pa.array(["file://FOLDER/0.png"]),
    ],
    ids=lambda column: str(column.type)[:20],
)
def test_images_of_every_kind(tmp_path, column):
    (tmp_path / "0.png").write_bytes(png(0))
    if pa.types.is_string(column.type):
        column = pa.array([text.replace("FOLDER", str(tmp_path)) for text in column.to_pylist()])
    source = opened(write(tmp_path / "a.parquet", {"image": column, "text": ["x"]}), image_column="image")
    assert source.record(0).image == png(0)
    assert source.index.heights_px.tolist() == [20]


def test_captions_of_every_kind(tmp_path):
    kinds = [pa.array(["x"]), pa.array(["x"], pa.large_string()), pa.array(["x"]).dictionary_encode()]
    for i, column in enumerate(kinds):
        source = opened(write(tmp_path / f"{i}.parquet", {"jpg": [png(0)], "TEXT": column}))
        assert source.record(0).texts == {"text": "x"}


def test_several_caption_fields(tmp_path):
    columns = {**usual(3), "alt": ["alt 0", None, ""]}
    columns["caption"][2] = " "
    path = write(tmp_path / "a.parquet", columns)
    source = opened(path, captions={"fields": ["text", "alt"]})
    assert [r.texts for r in records(source)] == [{"text": "image 0", "alt": "alt 0"}, {"text": "image 1"}]
    assert counts(source) == {"no caption (column 'caption', 'alt')": (1, ["a.parquet row 2"])}
    only = opened(path, captions={"fields": ["alt"]})
    assert [r.texts for r in records(only)] == [{"alt": "alt 0"}]
    assert only.record(0).metadata["caption"] == "image 0"


def test_class_labels(tmp_path):
    path = write(
        tmp_path / "a.parquet", {"jpg": usual()["jpg"], "label": [0, 1, 2, None, -1, 1], "caption": list("abcdef")}
    )
    source = opened(path, idx_to_prompt={0: "tench", 1: "shark"})
    assert [r.texts["text"] for r in records(source)] == ["tench", "shark", "shark"]
    assert counts(source) == {
        "class label without a name (column 'label')": (2, ["a.parquet row 2", "a.parquet row 4"]),
        "no caption (column 'label')": (1, ["a.parquet row 3"]),
    }
    (tmp_path / "names.json").write_text(json.dumps(["a", "b", "c"]))
    assert opened(path, idx_to_prompt=str(tmp_path / "names.json")).record(2).texts["text"] == "c"
    assert opened(path, idx_to_prompt="imagenet", caption_column="label").record(0).texts["text"].startswith("tench")


def test_names_that_a_hugging_face_table_carries(tmp_path):
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}
    note = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    table = pa.table({"image": usual(2)["jpg"], "label": [1, 0]}).replace_schema_metadata(note)
    source = opened(write(tmp_path / "a.parquet", table))
    assert [r.texts["text"] for r in records(source)] == ["dog", "cat"]
    broken = table.replace_schema_metadata({b"huggingface": b'{"info": {"features": 5}}'})
    with pytest.raises(UserError, match=r"data\.caption_column: no column looks like a caption"):
        opened(write(tmp_path / "b.parquet", broken))


@pytest.mark.parametrize(
    ("columns", "given", "said"),
    [
        ({"a": [1], "text": ["x"]}, {}, r"data\.image_column: no column looks like an image.*a \(whole numbers\)"),
        ({"jpg": [b""], "png": [b""], "text": ["x"]}, {}, r"data\.image_column: several columns .*: jpg, png\. Name"),
        ({"url": ["x"], "path": ["y"], "text": ["x"]}, {}, r"data\.image_column: several columns .*: url, path"),
        ({"jpg": [b""], "a": ["x"]}, {}, r"data\.caption_column: no column looks like .*: jpg \(bytes\), a \(text\)"),
        (
            {"jpg": [b""], "text": ["x"], "Caption": ["x"]},
            {},
            r"caption_column: several columns .*: text, Caption",
        ),
        ({"jpg": [b""], "text": ["x"]}, {"image_column": "png"}, r"data\.image_column: .* has no column 'png'"),
        ({"jpg": [b""], "text": ["x"]}, {"caption_column": "alt"}, r"data\.caption_column: .* has no column 'alt'"),
        ({"jpg": [b""], "text": ["x"]}, {"captions": {"fields": ["text", "b"]}}, r"captions\.fields: .* no column 'b'"),
        ({"jpg": [1.5], "text": ["x"]}, {"image_column": "jpg"}, r"column 'jpg' .* holds numbers, not bytes"),
        ({"jpg": [b""], "text": [1.5]}, {"caption_column": "text"}, r"column 'text' .* holds numbers, not text"),
        ({"jpg": [b""], "label": [1]}, {"caption_column": "label"}, r"holds whole numbers: name the classes"),
        (
            {"jpg": [b""], "text": ["x"]},
            {"idx_to_prompt": ["a"]},
            r"caption_column: no column looks like class",
        ),
        (
            {"jpg": [b""], "text": ["x"], "w": [1], "h": [1]},
            {"width_column": "w", "height_column": "h"},
            r"data\.width_column and data\.height_column have no effect: column 'jpg'",
        ),
        (
            {"url": ["http://x/y"], "text": ["x"], "w": [1]},
            {"width_column": "w", "height_column": "h"},
            r"data\.height_column: .* has no column 'h'",
        ),
    ],
)
def test_columns_that_are_missing_or_unclear(tmp_path, columns, given, said):
    with pytest.raises(UserError, match=r"(?s)" + said) as caught:
        opened(write(tmp_path / "a.parquet", columns), **given)
    setting = caught.value.setting  # that of the message; None where there are two
    assert str(caught.value).startswith(f"{setting}: " if setting else "data.width_column and data.height_column")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"caption_column": "a", "captions": {"fields": ["b"]}}, "caption_column: no effect"),
        (
            {"caption_column": "a", "captions": {"fields": ["text", "b"], "weights": [0, 1]}},
            "caption_column: no effect",
        ),
        ({"idx_to_prompt": ["a"], "captions": {"fields": ["b"]}}, "idx_to_prompt: no effect"),
        ({"width_column": "w"}, "width_column and height_column must be set together"),
        ({"image_column": "a", "caption_column": "a"}, "are both 'a'"),
        ({"path": []}, "path"),
    ],
)
def test_settings_without_effect_are_refused(given, said):
    with pytest.raises(ValidationError, match=said):
        parquet.Settings(**{"path": "x", **given})


def test_dirty_cells_are_counted(tmp_path):
    page = b"<html>" + b"x" * 100
    encoded_images = [png(0), None, b"", page, png(4)[:40], png(5), png(6), png(7), png(8)]
    captions = ["a", "b", "c", "d", "e", None, "", "  ", " fine\n"]
    source = opened(write(tmp_path / "a.parquet", {"jpg": encoded_images, "text": captions}))
    assert [r.texts["text"] for r in records(source)] == ["a", "fine"]
    assert counts(source) == {
        "no image: the cell is empty": (2, ["a.parquet row 1", "a.parquet row 2"]),
        "not an image (JPEG, PNG and WebP can be read)": (1, ["a.parquet row 3"]),
        "broken image": (1, ["a.parquet row 4"]),
        "no caption (column 'text')": (3, ["a.parquet row 5", "a.parquet row 6", "a.parquet row 7"]),
    }


def test_rows_that_failed_to_download_stop_no_run(tmp_path):
    """Nor do those without a caption; pages of HTML do."""
    columns = usual(60)
    columns["jpg"][:20] = [None] * 20
    columns["caption"][20:30] = [None] * 10
    path = write(tmp_path / "a.parquet", columns)
    assert open_dataset(settings(path, held_out_fraction=0), "train").size == 30
    columns["jpg"][30:40] = [b"<html>"] * 10
    with pytest.raises(UserError, match=r"10 of 30 samples cannot be used(.|\n)*not an image"):
        open_dataset(settings(write(path, columns)), "train")


def test_paths_that_lead_nowhere_are_counted(tmp_path):
    (tmp_path / "good.png").write_bytes(png(0))
    (tmp_path / "page.png").write_text("<html>")
    (tmp_path / "folder.png").mkdir()
    paths = [
        "good.png",
        "gone.png",
        "folder.png",
        "page.png",
        "good.png/x.png",
        "a\nb",
        "ftp://x/y.png",
        "http://",
        None,
    ]
    source = opened(write(tmp_path / "a.parquet", {"path": paths, "text": ["x"] * 9}))
    assert source.index.count == 1
    assert {reason: count for reason, (count, _) in counts(source).items()} == {
        "there is no image file at the path": 3,
        "not an image (JPEG, PNG and WebP can be read)": 1,
        "neither a path nor an address": 1,
        "an address of a kind that is not read (http, https, s3, gs are)": 1,
        "an address without a host": 1,
        "no image: the cell is empty": 1,
    }


def test_text_that_is_no_utf8(tmp_path):
    bad = pa.array([b"caf\xe9", b"fine"]).view(pa.string())
    path = write(tmp_path / "a.parquet", {"jpg": usual(2)["jpg"], "text": bad, "note": bad})
    source = opened(path)
    assert [(r.texts["text"], r.metadata) for r in records(source)] == [("fine", {"note": "fine"})]
    assert counts(source) == {"no caption (column 'text')": (1, ["a.parquet row 0"])}
    both = opened(write(tmp_path / "b.parquet", {"jpg": usual(2)["jpg"], "text": ["a", "b"], "note": bad}))
    assert [r.metadata for r in records(both)] == [{"note": None}, {"note": "fine"}]
    assert both.index.texts["note"].to_pylist() == [None, "fine"]


def test_metadata_of_every_kind(tmp_path):
    columns = {
        **usual(3),
        "bool": [True, False, None],
        "whole": pa.array([1, None, 2**60], pa.int64()),
        "odd": [float("nan"), float("inf"), 1.5],
        "decimal": pa.array([1, 2, None], pa.decimal128(5, 2)),
        "words": pa.array(["a", None, "a"]).dictionary_encode(),
        "long": ["x" * 63, "x" * 64, "x"],
        "list": [[1], [2], [3]],
        "nothing": pa.nulls(3),
    }
    source = opened(write(tmp_path / "a.parquet", columns))
    index = source.index
    assert {name: index.numbers[name].to_pylist() for name in index.numbers} == {
        "bool": [1.0, 0.0, None],
        "whole": [1.0, None, float(2**60)],
        "odd": [None, None, 1.5],
        "decimal": [1.0, 2.0, None],
    }
    assert {name: index.texts[name].to_pylist() for name in index.texts} == {"words": ["a", None, "a"]}
    assert source.record(2).metadata["whole"] == 2**60
    assert "list" not in source.record(0).metadata


def test_ids_hang_on_the_contents_alone(tmp_path):
    first = opened(write(tmp_path / "a" / "x.parquet", usual()))
    moved = opened(write(tmp_path / "b" / "renamed.parquet", usual()))
    assert first.index.ids.tolist() == moved.index.ids.tolist()
    longer = {name: column + column[:1] for name, column in usual().items()}
    assert not set(opened(write(tmp_path / "c.parquet", longer)).index.ids) & set(first.index.ids)


def test_ids_that_the_table_names(tmp_path):
    columns = {**usual(3), "daguerre_id": pa.array([7, None, 9], pa.int64())}
    source = opened(write(tmp_path / "a.parquet", columns))
    ids = source.index.ids.tolist()
    assert (ids[0], ids[2]) == (7, 9)
    assert ids[1] > 9
    assert "daguerre_id" not in source.record(0).metadata


def test_the_same_table_twice_is_refused(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.parquet", usual())
    with pytest.raises(UserError, match=r"data\.path: sample (\d) of .*a\.parquet and sample \1 of .*b\.parquet"):
        _ = opened(tmp_path).index


def test_tables_of_one_source_are_alike(tmp_path):
    write(tmp_path / "a.parquet", usual(2))
    write(tmp_path / "b.parquet", {"jpg": [png(9)], "text": ["x"]})
    with pytest.raises(UserError, match=r"data\.path: .*b\.parquet has no column 'caption' as the first table has"):
        opened(tmp_path)
    write(tmp_path / "b.parquet", {"jpg": ["9.png"], "caption": ["x"]})
    with pytest.raises(UserError, match=r"b\.parquet: column 'jpg' holds text, but bytes in the first table"):
        opened(tmp_path)
    write(tmp_path / "b.parquet", {"more": [1], "jpg": [png(9)], "caption": ["x"]})
    source = opened(tmp_path)
    assert [r.texts["text"] for r in records(source)] == ["image 0", "image 1", "x"]
    assert source.index.numbers["more"].to_pylist() == [None, None, 1.0]
    assert source.index.shard_starts.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", ""), (b"<html>Not found</html>", ""), (b"PAR1" + b"\0" * 100, ""), (b"PAR1", "")],
)
def test_a_file_that_is_no_table(tmp_path, content, said):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"data\.path: .*a\.parquet cannot be read as a table: .+\. Download"):
        opened(tmp_path)


def test_a_cut_file_names_itself(tmp_path):
    path = write(tmp_path / "a.parquet", usual())
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(UserError, match=r"data\.path: .*a\.parquet cannot be read as a table"):
        opened(path)


def test_a_path_that_matches_nothing(tmp_path):
    with pytest.raises(UserError, match=r"data\.path"):
        opened(tmp_path / "*.parquet")


def test_twin_columns_are_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array([png(0)]), pa.array(["a"]), pa.array(["b"])], ["jpg", "text", "text"])
    with pytest.raises(UserError, match=r"a\.parquet has more than one column called 'text'"):
        opened(write(tmp_path / "a.parquet", table))


def test_nothing_usable_lists_the_reasons(tmp_path):
    path = write(tmp_path / "a.parquet", {"jpg": [b"<html>", None], "text": ["a", "b"]})
    with pytest.raises(UserError, match=r"(?s)data\.path: no row of .*a\.parquet can be used.*an image.*is empty"):
        opened(path)


@pytest.mark.parametrize("compression", [pytest.param("none", marks=pytest.mark.long), "snappy"])
def test_damage_in_the_middle_loses_nothing_uncounted(tmp_path, compression):
    """Bits flipped anywhere before the footer: each row is the same as before, or is counted."""
    path = write(tmp_path / "a.parquet", usual(40), row_group_size=4, compression=compression)
    whole = path.read_bytes()
    good = {r.key.rpartition(" ")[2]: (r.image, r.texts) for r in records(opened(path))}
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    draws = np.random.default_rng(0)
    for trial in range(30):
        place = int(draws.integers(4, footer - 64))
        path.write_bytes(whole[:place] + bytes(draws.integers(0, 256, 64, np.uint8)) + whole[place + 64 :])
        source = opened(path)
        found = {r.key.rpartition(" ")[2]: (r.image, r.texts) for r in records(source)}
        assert len(found) + sum(count for count, _ in counts(source).values()) == 40, trial
        assert len([row for row in found if found[row] != good[row]]) <= 4


def test_a_table_that_changed_after_it_was_indexed(tmp_path):
    path = write(tmp_path / "a.parquet", usual())
    source = opened(path)
    _ = source.index
    other = usual()
    other["jpg"][2] = png(77)
    write(path, other)
    again = [source.record(i).texts["text"] for i in (0, 1, 3)]
    assert again == ["image 0", "image 1", "image 3"]
    with pytest.raises(Undecodable, match="bytes differ from the index"):
        source.record(2)
    write(path, usual(2))
    with pytest.raises(Undecodable, match="bytes differ from the index"):
        source.record(5)
    path.write_bytes(b"<html>")
    with pytest.raises(Undecodable, match="bytes differ from the index"):
        source.record(0)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        source.record(0)


def test_a_changed_table_is_indexed_anew(tmp_path):
    path = write(tmp_path / "a.parquet", usual())
    assert opened(path).index.count == 6
    write(path, usual(7))
    source = opened(path)
    assert source.index.count == 7
    assert len(records(source)) == 7


def test_other_columns_have_another_index(tmp_path):
    columns = {**usual(3), "alt": ["x", None, None]}
    path = write(tmp_path / "a.parquet", columns)
    assert opened(path).index.count == 3
    assert opened(path, caption_column="alt").index.count == 1
    assert opened(path).index.count == 3


@pytest.fixture
def decoded(monkeypatch):
    """Images that can only be decoded, and none decoded yet."""
    monkeypatch.setattr(verbatim.Finder, "ranges", lambda self, data: b"")
    monkeypatch.setattr(table_parquet, "_GROUPS", table_parquet._RowGroups())
    return monkeypatch


def test_large_row_groups_are_walked_through(tmp_path, decoded):
    path = write(tmp_path / "a.parquet", usual(50))
    expected = [r.image for r in records(opened(path))]
    decoded.setattr(table_parquet, "_GROUPS", table_parquet._RowGroups())
    decoded.setattr(table_parquet, "LARGE_BYTES", 1000)
    decoded.setattr(table_parquet, "SLICE_BYTES", 4000)
    source = opened(path, formats=["png"])
    assert "kept, but slow" in " ".join(notes(source))
    for i in [*range(50), 20, 3, 4, 49, 0]:
        assert source.record(i).image == expected[i]
    assert not table_parquet._GROUPS.held


def test_what_is_decoded_is_bounded(tmp_path, decoded):
    paths = [
        write(tmp_path / f"{i}.parquet", {"jpg": [png(i * 9 + j) for j in range(9)], "text": ["x"] * 9})
        for i in range(9)
    ]
    decoded.setattr(table_parquet, "KEPT_BYTES", 40_000)
    source = opened([str(path) for path in paths])
    for i in np.random.default_rng(0).permutation(81):
        assert source.record(int(i)).image == png(int(i))
        held = table_parquet._GROUPS
        assert held.held_bytes == sum(table.nbytes for table in held.held.values()) <= 40_000


MEMORY = """
import sys, resource
from daguerre.data.sources import parquet
def anonymous():
    return int(next(l for l in open('/proc/self/status') if l.startswith('RssAnon')).split()[1]) / 1e3
source = parquet.open_source(parquet.Settings(path=sys.argv[1], cache_dir=sys.argv[2], resolution=16), "train")
sizes = []
for i in range(100_000):
    source.record(i * 7 % source.index.count if len(sys.argv) > 3 else i % source.index.count)
    if i % 20_000 == 19_999:
        sizes.append(anonymous())
print(*sizes)
"""


@pytest.mark.long
def test_memory_stays_flat_over_100_000_samples(tmp_path):
    body = np.random.default_rng(0).bytes(10_000)
    for i in range(4):
        rows = [png(i, 8, 8) + j.to_bytes(4, "little") + body for j in range(5000)]
        write(tmp_path / f"{i}.parquet", {"jpg": rows, "text": ["x"] * 5000}, row_group_size=500)
    code = [sys.executable, "-c", MEMORY, str(tmp_path / "*.parquet"), str(tmp_path / "cache")]
    done = subprocess.run(code, capture_output=True, text=True, timeout=900, check=True)
    sizes = [float(size) for size in done.stdout.split()]
    assert max(sizes[1:]) - sizes[1] < 40, sizes
    assert max(sizes) < 800, sizes


@pytest.mark.long
def test_far_tables(tmp_path, s3):  # noqa: F811
    body = write(tmp_path / "a.parquet", usual()).read_bytes()
    near = opened(tmp_path / "a.parquet")
    for i in range(2):
        s3.put(f"set/{i}.parquet", body if i == 0 else write(tmp_path / "b.parquet", usual(3)).read_bytes())
    given = {"cache_dir": str(tmp_path / "cache")}
    source = opened("s3://bucket/set/", **given)
    assert source.is_remote
    assert source.index.ids[:6].tolist() == near.index.ids.tolist()
    assert [r.image for r in records(source)][:6] == [r.image for r in records(near)]
    assert source.name(6) == "s3://bucket/set/1.parquet row 0"
    assert source.files.of_shards.tolist() == [0, 1]
    assert source.files.sizes_bytes.tolist() == [source.prefetch(0), source.prefetch(1)]
    for kept in (tmp_path / "cache" / "shards").glob("??/*"):
        kept.unlink()
    again = opened("s3://bucket/set/", **given)
    assert again.prefetch(0) == len(body)
    assert again.prefetch(1) == (tmp_path / "b.parquet").stat().st_size
    before = s3.proxy.body_bytes
    assert len(records(again)) == 9
    assert s3.proxy.body_bytes == before


def test_far_tables_through_faults(tmp_path, faulty_s3):  # noqa: F811
    near = opened(write(tmp_path / "a.parquet", usual(30)))
    faulty_s3.put("a.parquet", (tmp_path / "a.parquet").read_bytes())
    for trial in range(3):
        source = opened("s3://bucket/a.parquet", cache_dir=str(tmp_path / f"cache{trial}"))
        assert [r.image for r in records(source)] == [r.image for r in records(near)]
        assert source.index.ids.tolist() == near.index.ids.tolist()


def far_and_few(tmp_path, store, encoded_images):
    """A far set of which few samples are wanted, with nothing in the cache."""
    path = write(
        tmp_path / "few" / "a.parquet", {"jpg": encoded_images, "text": [str(i) for i, _ in enumerate(encoded_images)]}
    )
    store.put("few/a.parquet", path.read_bytes())
    source = opened("s3://bucket/few/", cache_dir=str(tmp_path / "cache")).reading(np.array([0.05]))
    for kept in (tmp_path / "cache" / "shards").glob("??/*"):
        kept.unlink()
    return source


def test_few_samples_of_a_far_table_are_read_by_range(tmp_path, s3):  # noqa: F811
    encoded_images = [png(i, 80, 90) for i in range(100)]
    source = far_and_few(tmp_path, s3, encoded_images)
    before = s3.proxy.body_bytes
    for i in (7, 3, 99, 50, 51):
        assert source.record(i).image == encoded_images[i]
        assert source.record(i).texts == {"text": str(i)}
    assert source.prefetch(0) == 0
    assert s3.proxy.body_bytes - before < 0.4 * sum(map(len, encoded_images))
    assert not list((tmp_path / "cache" / "shards").glob("??/*"))
    much = source.reading(np.array([0.5]))
    assert much.record(5).image == encoded_images[5]
    assert list((tmp_path / "cache" / "shards").glob("??/*"))


@pytest.mark.long
def test_ranges_of_a_far_table_through_faults(tmp_path, s3):  # noqa: F811
    encoded_images = [png(i, 80, 90) for i in range(20)]
    source = far_and_few(tmp_path, s3, encoded_images)
    s3.proxy.faults = Faults(share=0.3)
    for i in np.random.default_rng(0).integers(0, 20, 40):
        assert source.record(int(i)).image == encoded_images[i]
    table_parquet._parquet.cache_clear()
    s3.proxy.faults = Faults(share=1.0, kinds=("error",))
    with pytest.raises(storage_io.StoreError, match="repeatedly"):
        source.record(1)


def test_a_far_table_that_was_replaced(tmp_path, s3):  # noqa: F811
    source = far_and_few(tmp_path, s3, [png(i, 80, 90) for i in range(20)])
    other = write(tmp_path / "other.parquet", {"jpg": [png(99)], "text": ["x"]})
    s3.put("few/a.parquet", other.read_bytes())
    with pytest.raises(Undecodable, match="bytes differ from the index"):
        source.record(3)


def test_a_far_table_that_is_not_there(s3):  # noqa: F811
    with pytest.raises(UserError, match=r"data\.path: s3://bucket/no\.parquet does not exist"):
        opened("s3://bucket/no.parquet")


def addresses(tmp_path, texts, **columns):
    return write(
        tmp_path / "urls" / "a.parquet", {"url": texts, "text": [f"x{i}" for i in range(len(texts))], **columns}
    )


def test_images_at_addresses(tmp_path, s3):  # noqa: F811
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "0.png").write_bytes(png(0))
    (tmp_path / "web" / "page.png").write_text("<html>")
    s3.put("1.png", png(1))
    with web_server(tmp_path / "web") as web:
        texts = [
            f"{web.url}/0.png",
            "s3://bucket/1.png",
            f"{web.url}/gone.png",
            "s3://bucket/gone.png",
            f"{web.url}/page.png",
        ]
        source = opened(addresses(tmp_path, texts))
        assert source.index.count == 5
        assert source.index.heights_px.tolist() == [0] * 5
        assert source.is_remote is False
        assert [source.record(i).image for i in (0, 1)] == [png(0), png(1)]
        for i in (2, 3):
            with pytest.raises(Undecodable, match=r"^gone: HTTP 404$"):
                source.record(i)
        assert source.record(4).image == b"<html>"


def test_addresses_that_nobody_can_ask_for(tmp_path):
    texts = ["http://[::1", "https://exa mple.com/a.png", "http://x:99999/a.png"]
    source = opened(addresses(tmp_path, texts))
    for i in range(3):
        with pytest.raises(Undecodable, match="an address that cannot be requested"):
            source.record(i)


@pytest.mark.parametrize("status", [403, 404, 410, 451])
def test_addresses_that_are_refused_for_good(tmp_path, s3, monkeypatch, status):  # noqa: F811
    source = opened(addresses(tmp_path, [f"{s3.proxy.url}/x.png"]))
    monkeypatch.setattr(type(s3.proxy), "draw", lambda *_: ("error", 0.0))
    monkeypatch.setattr(s3.proxy.server.RequestHandlerClass.func, "_error", lambda self, _: self.send_error(status))
    word = "gone" if status in (404, 410) else "refused"
    with pytest.raises(Undecodable, match=rf"^{word}: HTTP {status}$"):
        source.record(0)


@pytest.mark.long
def test_a_passing_fault_is_no_skip(tmp_path, s3):  # noqa: F811
    s3.put("1.png", png(1))
    source = opened(addresses(tmp_path, ["s3://bucket/1.png?token=SECRET", "s3://bucket/1.png"]))
    s3.proxy.faults = Faults(share=1.0, kinds=("error",))
    with pytest.raises(storage_io.StoreError, match=r"s3://bucket/1\.png.* HTTP 50"):
        source.record(1)
    s3.proxy.faults = Faults(share=0.3)
    for _ in range(20):
        assert source.record(1).image == png(1)


def test_sizes_of_images_at_addresses(tmp_path):
    texts = ["http://x/1.png", "http://x/2.png", "http://x/3.png"]
    path = addresses(tmp_path, texts, w=[640, None, -5], h=pa.array([480.0, 3.0, 7.0]))
    source = opened(path, width_column="w", height_column="h")
    assert (source.index.heights_px.tolist(), source.index.widths_px.tolist()) == ([480, 3, 7], [640, 0, 0])


def test_secrets_of_an_address_are_not_shown(tmp_path, s3):  # noqa: F811
    source = opened(addresses(tmp_path, ["http://user:hunter2@127.0.0.1:9/1.png?token=SECRET"]))
    with pytest.raises(OSError) as caught:  # noqa: PT011
        source.record(0)
    assert not re.search("hunter2|SECRET", str(caught.value) + repr(caught.value.__cause__))


_WALK = """
import sys
from pathlib import Path
from daguerre.data.table.parquet import ParquetTables
from daguerre.data.table.files import Unreadable

path = Path(sys.argv[1])
whole, tables, columns = path.read_bytes(), ParquetTables(), ["jpg", "caption"]
start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
for at in range(start, len(whole) - 8):
    # The length of a list of whole numbers, as histograms of levels are, and the letters of names.
    for byte in [whole[at] ^ 0x30] * (whole[at] in (0x16, 0x26)) + [0xFF] * (97 <= whole[at] <= 122):
        hurt = path.with_name(f"{at}-{byte}.parquet")
        hurt.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
        try:
            tables.schema(hurt)
            for _ in tables.parts(hurt, columns, "jpg", "a"):
                pass
            tables.slow(hurt, columns)
        except Unreadable:
            pass
print("survived")
"""


def test_a_damaged_footer_is_counted_or_refused_and_ends_no_process(tmp_path):
    table = pa.table({"jpg": [png(0), png(1)], "caption": ["a", None]})
    pq.write_table(table, tmp_path / "a.parquet", store_schema=False)
    command = [sys.executable, "-c", _WALK, str(tmp_path / "a.parquet")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "survived\n", done.stderr[-2000:]
