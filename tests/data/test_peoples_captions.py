"""Captions and archives as people have them, through every source: lists of captions, JSON, what programs leave."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tars
from PIL import Image

from daguerre import plugins
from daguerre.cli import main
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
