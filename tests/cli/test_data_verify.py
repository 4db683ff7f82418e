"""`daguerre data verify`: what is whole, what is damaged and where, and what cannot be known."""

import json
import re
import shutil
from pathlib import Path

import data_sets
import masked
import numpy as np
import pytest
from quick_cases import crossed

from daguerre import errors
from daguerre.cli import main
from daguerre.cli.data import verify as data_verify
from daguerre.data.index.index import Index
from daguerre.data.tools import manifest


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def packed(place, capsys) -> Path:
    data_sets.shards(place / "raw", 3, 10)
    assert main.run(["data", "pack", "raw", "-o", "packed", "shard_samples=10"]) == 0
    capsys.readouterr()
    return place / "packed"


def verify(*arguments) -> int:
    return main.run(["data", "verify", *map(str, arguments)])


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_what_is_whole_is_said_to_be(packed, capsys, processes):
    assert verify("packed", "share=1", f"processes={processes}") == 0
    said = capsys.readouterr().out
    assert "3 shards, 30 samples" in said
    assert "30 images decoded" in said
    assert said.count("matches its index") == 3
    assert "not known" not in said
    assert "no damage found in what was checked" in said


def test_each_damaged_sample_is_found(packed, capsys):
    path = packed / "shard-00001.tar"
    data = bytearray(path.read_bytes())
    for name in (b"000000012.jpg", b"000000017.txt"):
        data[data.index(name) + 512 + 3] ^= 1
    path.write_bytes(data)
    assert verify("packed") == 1
    said = capsys.readouterr().out
    assert "shard-00001.tar         10" in said
    assert "DAMAGED: 2 samples" in said
    assert said.count("matches its index") == 2
    assert "000000012" in said
    assert "000000017" in said
    assert "file that differs from its index" in said
    assert "the data is damaged" in said


def test_damaged_masks_are_found(place, capsys):
    masked.folder(place / "images")
    cut = place / "images" / "03.mask.png"
    cut.write_bytes(cut.read_bytes()[:-30])
    assert verify("images", "share=1") == 1
    said = capsys.readouterr().out
    assert "mask: truncated image" in said
    assert "03.png" in said


def test_damage_between_samples_is_found_by_the_digest(packed, capsys):
    path = packed / "shard-00002.tar"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert verify("packed", "share=0") == 1
    assert "shard-00002.tar         10" in capsys.readouterr().out


def test_a_shard_that_was_cut(packed, capsys):
    path = packed / "shard-00000.tar"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert verify("packed") == 1
    said = capsys.readouterr().out
    assert f"({len(data):,} bytes, now {len(data) // 2:,})" in said
    assert "DAMAGED" in said


def test_a_shard_that_is_missing(packed, capsys):
    (packed / "shard-00001.tar").unlink()
    assert verify("packed") == 1
    assert "shard that is listed in dataset.json but does not exist" in capsys.readouterr().out
    assert verify("packed/shard-00000.tar", "packed/shard-00002.tar") == 1
    assert "shard-00001.tar" in capsys.readouterr().out


def test_some_of_the_shards_may_be_asked_for(packed, capsys):
    assert verify("packed/shard-00000.tar") == 0
    assert "1 shard, 10 samples" in capsys.readouterr().out


def test_a_packing_that_was_not_finished(packed, capsys):
    path = packed / "dataset.json"
    path.write_text(json.dumps(manifest.signed(json.loads(path.read_text()) | {"complete": False})), encoding="utf-8")
    assert verify("packed") == 1
    assert "unfinished packing" in capsys.readouterr().out


@pytest.mark.parametrize(("where", "bit"), crossed([0.01, 0.3, 0.6, 0.99], [0, 3]))
def test_one_bit_of_the_list_of_shards_is_found(packed, capsys, where, bit):
    data = bytearray((packed / "dataset.json").read_bytes())
    data[int(where * len(data))] ^= 1 << bit
    (packed / "dataset.json").write_bytes(data)
    assert verify("packed") == 1
    assert "damaged dataset.json" in capsys.readouterr().out
    assert main.run(["data", "pack", "raw", "-o", "packed", "shard_samples=10"]) == errors.REFUSED
    assert "dataset.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{", "[]", "[[[[", '{"shards": []}', "null", '{"made_by": "daguerre 0.1"}'])
def test_a_damaged_list_hides_no_missing_shard(packed, capsys, content):
    (packed / "dataset.json").write_text(content)
    (packed / "shard-00001.tar").unlink()
    assert verify("packed") == 1
    said = capsys.readouterr().out
    assert "damaged dataset.json" in said
    assert "index of a shard that does not exist: " in said
    assert "shard-00001.tar.index" in said


def test_a_list_of_an_earlier_version_has_no_digest(packed, capsys):
    path = packed / "dataset.json"
    listed = json.loads(path.read_text())
    del listed["digest"]
    path.write_text(json.dumps(listed))
    assert verify("packed") == 0
    listed["shards"][0]["digest"] = "0" * 32
    path.write_text(json.dumps(listed))
    assert verify("packed") == 1
    listed["shards"][0] = 7
    path.write_text(json.dumps(listed))
    assert verify("packed") == 1


def test_a_dataset_json_of_another_program_is_said(packed, capsys):
    (packed / "dataset.json").write_text('{"features": []}')
    assert verify("packed") == 0
    assert "dataset.json that another program wrote: shards are not compared with it" in capsys.readouterr().out


def test_a_damaged_image_that_was_packed_is_found_by_decoding(place, capsys):
    whole = data_sets.jpeg(3)
    data_sets.shard(place / "raw" / "a.tar", range(10), p3=whole[:-40])
    assert main.run(["data", "index", "raw"]) == 0
    assert verify("raw", "share=0") == 0
    capsys.readouterr()
    assert verify("raw", "share=1") == 1
    said = capsys.readouterr().out
    assert "truncated image" in said
    assert "00003" in said


def test_without_an_index_it_says_what_cannot_be_known(place, capsys):
    data_sets.shards(place / "raw", 2, 5)
    assert verify("raw") == 0
    said = capsys.readouterr().out
    assert said.count("readable; no digest to compare it with") == 2
    assert "not known, for 2 of 2 shards: whether their bytes are what they once were" in said
    assert "daguerre data index" in said
    assert verify("raw") == 0
    assert "not known" not in capsys.readouterr().out


def test_without_an_index_a_broken_tar_is_found(place, capsys):
    raw = data_sets.shards(place / "raw", 2, 5)
    data = (raw / "part-01.tar").read_bytes()
    (raw / "part-01.tar").write_bytes(data[:9000] + bytes(1024) + data[10024:])
    assert verify("raw") == 1
    said = capsys.readouterr().out
    assert "DAMAGED" in said
    assert "how many samples were in these bytes is not known" in said


def test_a_folder_of_images(place, capsys):
    folder = data_sets.folder(place / "images", 8)
    assert verify("images", "share=1") == 0
    said = capsys.readouterr().out
    assert "8 samples; 8 images decoded" in said
    assert "not checked: whether files changed since they were created" in said
    whole = (folder / "003.jpg").read_bytes()
    (folder / "003.jpg").write_bytes(whole[:-40])
    assert verify("images", "share=1") == 1
    assert "truncated image: 003.jpg" in capsys.readouterr().out


def test_a_recipe(packed, place, capsys):
    text = "data:\n  source: mix\n  sources:\n    a: {source: webdataset, path: packed}\n"
    text += "    b: {source: folder, path: images}\n"
    (place / "mine.yaml").write_text(text, encoding="utf-8")
    data_sets.folder(place / "images", 3)
    assert verify("mine.yaml") == 0
    said = capsys.readouterr().out
    assert "3 shards, 30 samples" in said
    assert "3 samples;" in said
    assert verify("quickstart") == 2
    assert "there are no files to verify" in capsys.readouterr().err


def test_many_shards_are_not_listed_one_by_one(place, capsys):
    data_sets.shards(place / "raw", 25, 1)
    assert main.run(["data", "pack", "raw", "-o", "packed", "shard_samples=1"]) == 0
    capsys.readouterr()
    assert verify("packed") == 0
    assert "shard-000" not in capsys.readouterr().out
    shutil.copy(place / "packed" / "shard-00003.tar", place / "packed" / "shard-00004.tar")
    assert verify("packed") == 1
    said = capsys.readouterr().out
    assert "24 more shards without faults" in said
    assert "shard-00004.tar " in said


def test_a_share_that_is_none(packed, capsys):
    assert verify("packed", "share=2") == 2
    assert "share" in capsys.readouterr().err


def test_all_images_are_decoded_where_that_takes_a_minute_at_most(place, capsys, monkeypatch):
    folder = data_sets.folder(place / "images", 40)
    whole = (folder / "033.jpg").read_bytes()
    (folder / "033.jpg").write_bytes(whole[:-40])
    assert verify("images") == 1
    said = capsys.readouterr().out
    assert "40 samples; 40 images decoded (all)" in said
    assert "40 of 40 samples that were found can be used" in said
    assert "% of an image's pixels, on average" in said
    assert "truncated image: 033.jpg" in said

    monkeypatch.setattr(data_verify, "_MINUTE_PX", 2e6)
    verify("images")
    said = capsys.readouterr().out
    decoded = int(re.search(r"40 samples; (\d+) images decoded \(\d+ %; share=1 decodes all\)", said)[1])
    assert 8 < decoded < 32
    verify("images")
    assert f"{decoded} images decoded" in capsys.readouterr().out


def test_the_images_that_are_decoded_follow_from_their_sizes(monkeypatch):
    monkeypatch.setattr(data_verify, "is_remote", lambda source: source == "far")

    def share(count, side):
        sides = np.full(count, side, np.int32)
        return data_verify._usual_share("near", Index(np.arange(count), np.array([0, count]), sides, sides))

    assert share(50_000, 512) == 1
    assert share(100_000, 1024) == pytest.approx(2e10 / (100_000 * (1024**2 + 1e5)))
    assert share(10_000, 0) == 0.1  # not known before they are fetched
    assert data_verify._usual_share("far", Index(np.arange(1), np.array([0, 1]), *np.ones((2, 1), np.int32))) == 0.01
