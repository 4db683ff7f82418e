"""`daguerre data pack` as a user runs it: what it writes, goes on with after a kill, and refuses."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import data_sets
import numpy as np
import pytest
import torch

from daguerre.cli import main
from daguerre.data.dataset import open_dataset
from daguerre.data.loading import collate
from daguerre.data.sources import shapes, webdataset
from daguerre.data.tools import manifest


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pack(*arguments) -> int:
    return main.run(["data", "pack", *arguments])


def listing(folder) -> dict:
    return json.loads((Path(folder) / "dataset.json").read_text(encoding="utf-8"))


def contents(folder) -> dict:
    """Every file but indexes, which hold the time of their shard."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.suffix != ".index"}


def test_a_folder_becomes_shards(place, capsys):
    data_sets.folder(place / "images", 10)
    assert pack("images", "-o", "out", "shard_samples=4") == 0
    said = capsys.readouterr().out
    assert "images: read as a folder of images (data.source=folder)" in said
    assert "packed 10 samples into 3 shards" in said
    assert f"data.source=webdataset data.path={place / 'out'}" in said
    assert sorted(path.name for path in (place / "out").iterdir()) == [
        "dataset.json",
        *(f"shard-0000{i}.tar{end}" for i in range(3) for end in ("", ".index")),
    ]
    document = listing("out")
    assert (document["samples"], document["complete"], document["samples_per_shard"]) == (10, True, 4)
    assert document["bytes"] == sum(path.stat().st_size for path in (place / "out").glob("*.tar"))
    assert document["source"] == {"source": "folder", "path": "images"}
    packed = webdataset.open_source(webdataset.Settings(path="out"), "train")
    assert packed.record(3).image == (place / "images" / "003.jpg").read_bytes()
    assert packed.record(3).texts["text"] == "picture number 3"


def test_the_same_command_again_keeps_everything(place, capsys):
    data_sets.folder(place / "images", 6)
    assert pack("images", "-o", "out", "shard_samples=2") == 0
    before = {path.name: (path.read_bytes(), path.stat().st_ino) for path in (place / "out").glob("*.tar*")}
    capsys.readouterr()
    assert pack("images", "-o", "out", "shard_samples=2") == 0
    assert "all 3 shards already exist and are complete; nothing was written" in capsys.readouterr().out
    assert before == {path.name: (path.read_bytes(), path.stat().st_ino) for path in (place / "out").glob("*.tar*")}


@pytest.mark.long  # of the quick tests, a packing that is killed ends as one process packs
def test_two_packings_are_equal_to_the_byte_whatever_the_processes(place):
    data_sets.shards(place / "raw")
    assert pack("raw", "-o", "one", "shard_samples=7", "processes=1") == 0
    assert pack("raw", "-o", "two", "shard_samples=7", "processes=3") == 0
    assert contents("one") == contents("two")


def test_filters_choose_and_the_rest_is_counted(place, capsys):
    data_sets.shards(place / "raw")
    assert pack("raw", "-o", "out", 'data.filters=score < 2 and lang == "en"') == 0
    document = listing("out")
    assert document["samples"] == 15
    assert {reason: entry["count"] for reason, entry in document["left_out"].items()} == {
        "filter: score < 2": 10,
        "filter: lang == 'en'": 5,
    }
    assert document["source"]["filters"] == 'score < 2 and lang == "en"'
    said = capsys.readouterr().out
    assert "10  filter: score < 2" in said


def test_images_that_are_broken_are_left_out_and_named(place, capsys):
    data_sets.shard(place / "raw" / "a.tar", range(8), p3=b"garbage" * 9)
    assert pack("raw", "-o", "out") == 0
    assert listing("out")["samples"] == 7
    assert "00003.jpg" in capsys.readouterr().out


def test_in_another_order_and_only_some(place):
    data_sets.shards(place / "raw")
    assert pack("raw", "-o", "some", "count=5") == 0
    assert pack("raw", "-o", "mixed", "order=shuffled", "seed=3") == 0
    some, mixed, raw = (
        webdataset.open_source(webdataset.Settings(path=path), "train").index.ids for path in ("some", "mixed", "raw")
    )
    assert some.tolist() == raw[:5].tolist()
    assert mixed.tolist() != raw.tolist()
    assert sorted(mixed) == sorted(raw)


def test_shards_of_a_size(place):
    data_sets.shards(place / "raw")
    assert pack("raw", "-o", "out", "shard_mb=0.03") == 0
    sizes = [entry["bytes"] for entry in listing("out")["shards"][:-1]]
    assert all(0.015e6 < size < 0.06e6 for size in sizes)


def test_what_the_network_sees_is_the_same_from_drawn_and_from_packed_images(place):
    assert pack("quickstart", "-o", "out", "count=24", "shard_samples=10") == 0
    alike = {"resolution": 64, "caption_dropout": 0.5}
    packed = webdataset.Settings(path="out", shuffle=False, held_out_fraction=0.0, **alike)
    first, second = (open_dataset(settings, "train") for settings in (shapes.Settings(**alike), packed))
    for _, one, other in zip(range(3), made(first), made(second), strict=False):
        assert np.array_equal(one.keys, other.keys)
        assert one.texts == other.texts
        assert torch.equal(one.pixels_BCHW, other.pixels_BCHW)


def made(dataset):
    """The batches of 8 of a data set, as they come."""
    for planned in dataset.plan(5, 8).batches(0):
        task = collate.Task(dataset.reads(planned.slots), dataset.buckets[planned.bucket])
        yield collate.Collator(dataset.members, 5).collate(task)[0]


@pytest.mark.long
def test_killed_and_started_again(place):
    data_sets.shards(place / "raw", 6, 20)
    assert pack("raw", "-o", "whole", "shard_samples=5", "processes=1") == 0
    command = [sys.executable, "-m", "daguerre", "data", "pack", "raw", "-o", "out", "shard_samples=5", "processes=2"]
    kills = 0
    (place / "out").mkdir()
    for name in (".shard-00001.tar.tmp", "shard-00001.tar.index.77.part"):
        (place / "out" / name).write_bytes(b"left by a kill")
    for seconds in (0.0, 0.2):
        process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
        there = len(list((place / "out").glob("*.tar"))) if (place / "out").exists() else 0
        deadline = time.monotonic() + 60
        while process.poll() is None and len(list((place / "out").glob("*.tar"))) <= min(there, 22):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(seconds)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills
    assert pack("raw", "-o", "out", "shard_samples=5") == 0
    assert contents("out") == contents("whole")


@pytest.mark.long
def test_ctrl_c_ends_at_once_without_a_traceback(place):
    data_sets.shards(place / "raw", 6, 200)
    command = [sys.executable, "-m", "daguerre", "data", "pack", "raw", "-o", "out", "shard_samples=10", "processes=2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(Path("out").glob("*.tar")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["raw"], "no output given"),
        (["quickstart", "-o", "out"], "is endless"),
        (["quickstart", "-o", "out", "count=3", "order=shuffled"], "no order to change"),
        (["raw", "-o", "out", "shard_mb=1", "shard_samples=3"], "give only one of them"),
        (["raw", "-o", "out", "data.filters=score > 99"], "none of the 30 samples"),
        (["raw", "-o", "out", "data.filters=scoer > 99"], "no sample has a field scoer"),
        (["raw", "-o", "raw"], "holds tar files already"),
        (["raw", "-o", "https://host/out"], "written to a folder, s3:// or gs://"),
        (["mixed.yaml", "-o", "out"], "only one source"),
    ],
)
def test_what_is_refused(place, capsys, arguments, why):
    data_sets.shards(place / "raw")
    source = "{source: webdataset, path: raw}"
    (place / "mixed.yaml").write_text(f"data: {{sources: {{a: {source}, b: {source}}}}}", encoding="utf-8")
    assert pack(*arguments) == 2
    assert why in capsys.readouterr().err
    assert not (place / "out").exists()


def test_a_folder_that_holds_another_packing(place, capsys):
    data_sets.shards(place / "raw")
    assert pack("raw", "-o", "out") == 0
    for changed in ("shard_samples=3", "data.filters=score < 1", "count=4", "order=shuffled"):
        assert pack("raw", "-o", "out", changed) == 2
        assert "holds shards of other data, or with other filters or sizes (30 samples" in capsys.readouterr().err
    (place / "out" / "dataset.json").write_text("{}", encoding="utf-8")
    assert pack("raw", "-o", "out") == 2
    assert "was not written by `data pack`" in capsys.readouterr().err


def test_two_at_once_are_refused(place, capsys):
    data_sets.shards(place / "raw", 1, 3)
    (place / "out").mkdir()
    descriptor = os.open(place / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert pack("raw", "-o", "out") == 3
    assert "another process is packing into" in capsys.readouterr().err
    os.close(descriptor)
    assert pack("raw", "-o", "out") == 0


def test_credentials_in_addresses_are_not_written_down():
    settings = webdataset.Settings(path=("https://me:secret@host/a.tar?X-Signature=secret", "s3://bucket/b.tar"))
    written = json.dumps(manifest.given(settings))
    assert "secret" not in written
    assert "https://***@host/a.tar?***" in written
    assert "s3://bucket/b.tar" in written
