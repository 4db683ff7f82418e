"""`daguerre data index`: indexes beside shards, once, and anew where a shard has changed."""

from pathlib import Path

import data_sets
import pytest

from daguerre.cli import main
from daguerre.data.index import cache
from daguerre.data.sources import webdataset


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def index(*arguments) -> int:
    return main.run(["data", "index", *arguments])


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_each_shard_gets_an_index_that_training_uses(place, capsys, processes):
    raw = data_sets.shards(place / "raw", 3, 4)
    assert index("raw", f"processes={processes}") == 0
    assert "indexed 3 shards: 12 samples" in capsys.readouterr().out
    paths = sorted(raw.glob("*.index"))
    assert [path.name for path in paths] == [f"part-0{i}.tar.index" for i in range(3)]
    source = webdataset.open_source(webdataset.Settings(path="raw"), "train")
    assert list(source.paths) == [path.absolute() for path in paths]
    assert source.index.count == 12


def test_what_has_one_is_left_alone(place, capsys):
    raw = data_sets.shards(place / "raw", 2, 4)
    assert index("raw/*.tar") == 0
    before = [(path.stat().st_ino, path.read_bytes()) for path in sorted(raw.glob("*.index"))]
    data_sets.shard(raw / "part-02.tar", range(20, 22))
    capsys.readouterr()
    assert index("raw") == 0
    assert "indexed 1 shard: 2 samples" in capsys.readouterr().out
    assert [(path.stat().st_ino, path.read_bytes()) for path in sorted(raw.glob("*.index"))][:2] == before
    assert index("raw") == 0
    assert "all 3 shards have an index; again=true makes them again" in capsys.readouterr().out
    assert index("raw", "again=true") == 0
    assert "indexed 3 shards" in capsys.readouterr().out


def test_a_shard_that_changed_is_indexed_anew(place, capsys):
    raw = data_sets.shards(place / "raw", 2, 4)
    assert index("raw") == 0
    data_sets.shard(raw / "part-01.tar", range(4, 30))
    (raw / "part-00.tar.index").write_bytes(b"no index at all")
    capsys.readouterr()
    assert index("raw") == 0
    assert "indexed 2 shards: 30 samples" in capsys.readouterr().out
    assert cache.load(raw / "part-01.tar.index").table.num_rows == 26


def test_damage_is_told_and_is_the_exit_code(place, capsys):
    raw = data_sets.shards(place / "raw", 2, 4)
    data = (raw / "part-00.tar").read_bytes()
    (raw / "part-00.tar").write_bytes(data[: len(data) // 2])
    assert index("raw") == 1
    said = capsys.readouterr().out
    assert "damaged shard" in said
    assert "part-00.tar: bytes" in said or "part-00.tar: cut off" in said
    assert cache.load(raw / "part-00.tar.index").about.damage


def test_images_that_cannot_be_used_are_told(place, capsys):
    data_sets.shard(place / "raw" / "a.tar", range(4), p2=b"<html>not found</html>")
    assert index("raw") == 0
    said = capsys.readouterr().out
    assert "indexed 1 shard: 3 samples" in said
    assert "not an image" in said
    assert "00002.jpg" in said


def test_for_other_formats_than_the_usual(place):
    raw = data_sets.shards(place / "raw", 1, 4)
    formats = "data.formats=[jpeg, gif]"
    assert index("raw", formats) == 0
    settings = webdataset.Settings(path="raw", formats=("jpeg", "gif"))
    assert list(webdataset.open_source(settings, "train").paths) == [(raw / "part-00.tar.index").absolute()]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "no shards given"),
        (["nothing"], "nothing"),
        (["images"], "ends in .tar"),
        (["https://host/part-{00..09}.tar"], "a web server cannot be written to"),
        (["page.tar"], "is not a tar"),
        (["raw", "agian=true"], "agian"),
        (["raw", "processes=0"], "processes"),
    ],
)
def test_what_is_refused(place, capsys, arguments, why):
    data_sets.shards(place / "raw", 1, 1)
    data_sets.folder(place / "images", 1)
    (place / "page.tar").write_text("<!DOCTYPE html><html>please log in</html>" * 40, encoding="utf-8")
    assert index(*arguments) == 2
    assert why in capsys.readouterr().err
