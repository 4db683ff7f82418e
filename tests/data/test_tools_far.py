"""The `data` verbs on an object store: packed to it, indexed in it, verified there, and no secret in any message."""

import json
from pathlib import Path

import pytest
from faulty_store import SECRETS, Faults, s3  # noqa: F401
from shards import build

from daguerre.cli import main
from daguerre.storage import io as storage_io
from daguerre.storage.location import Location


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def data(*arguments) -> int:
    return main.run(["data", *arguments])


def whole(url) -> bytes:
    return storage_io.read(Location(url), 0, storage_io.size(Location(url)).bytes)


@pytest.mark.long
def test_pack_verify_and_look(place, s3, capsys):  # noqa: F811
    build(place / "raw", 2, 6)
    assert data("pack", "raw", "-o", "s3://bucket/set", "shard_samples=5") == 0
    said = capsys.readouterr().out
    assert "train on them with: data.source=webdataset data.path=s3://bucket/set/\n" in said
    assert json.loads(whole("s3://bucket/set/dataset.json"))["samples"] == 12
    assert data("pack", "raw", "-o", "s3://bucket/set/", "shard_samples=5") == 0
    assert "all 3 shards already exist and are complete" in capsys.readouterr().out
    assert data("verify", "s3://bucket/set/", "share=1", "processes=1") == 0
    said = capsys.readouterr().out
    assert "3 shards, 12 samples" in said
    assert said.count("matches its index") == 3
    assert data("stats", "s3://bucket/set/", "data.resolution=32", "read=4") == 0
    assert data("show", "s3://bucket/set/", "data.resolution=32", "count=4") == 0
    shard = bytearray(whole("s3://bucket/set/shard-00001.tar"))
    shard[shard.index(b"000000006.txt") + 512] ^= 1
    storage_io.write("s3://bucket/set/shard-00001.tar", bytes(shard))
    capsys.readouterr()
    assert data("verify", "s3://bucket/set/", "processes=1") == 1
    said = capsys.readouterr().out
    assert "DAMAGED: 1 sample\n" in said
    assert said.count("matches its index") == 2


@pytest.mark.long
def test_index_in_the_store_serves_another_machine(place, s3, capsys, monkeypatch):  # noqa: F811
    build(place / "raw", 2, 6)
    for path in (place / "raw").iterdir():
        s3.put(f"raw/{path.name}", path.read_bytes())
    assert data("index", "s3://bucket/raw/") == 0
    assert "indexed 2 shards: 12 samples" in capsys.readouterr().out
    assert data("index", "s3://bucket/raw/") == 0
    assert "all 2 shards have an index" in capsys.readouterr().out
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "elsewhere"))
    before = s3.proxy.body_bytes
    assert data("stats", "s3://bucket/raw/", "data.resolution=32", "read=1", "images=0") == 0
    assert s3.proxy.body_bytes - before < sum(path.stat().st_size for path in (place / "raw").iterdir())


@pytest.mark.long
def test_faults_change_nothing(place, s3, capsys):  # noqa: F811
    build(place / "raw", 2, 6)
    s3.proxy.faults = Faults(0.3)
    assert data("pack", "raw", "-o", "s3://bucket/set", "shard_samples=5", "processes=2") == 0
    assert data("verify", "s3://bucket/set/", "share=1") == 0


def test_a_store_out_of_reach_is_an_error_without_secrets(place, s3, capsys):  # noqa: F811
    build(place / "raw", 1, 3)
    assert data("pack", "raw", "-o", "s3://bucket/set") == 0
    s3.proxy.faults = Faults(1.0, kinds=("error",))
    capsys.readouterr()
    for verb in (["verify", "s3://bucket/set/"], ["index", "s3://bucket/set/"], ["pack", "raw", "-o", "s3://bucket/b"]):
        assert data(*verb) in (1, 2)
        said = capsys.readouterr().err
        assert "s3://bucket/" in said
        assert "Traceback" not in said
        assert not any(secret in said for secret in SECRETS)


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("other/x.tar", "There is nothing: check the spelling"),
        ("set/a.jpg", "a folder of images, which can only be read locally"),
    ],
)
def test_a_prefix_without_shards_is_no_folder_here(place, s3, capsys, key, told):  # noqa: F811
    s3.put(key, b"1")
    assert data("stats", "s3://bucket/set/") == 2
    said = capsys.readouterr().err
    assert "data.path: 's3://bucket/set/' holds no shards or tables" in said
    assert told in said
