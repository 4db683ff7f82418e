"""A cache is filled whatever befalls it: kills, several processes, a store that fails. No row is stale, lost or double,
and all are equal to the bit to those of one quiet process. Minutes: `make test-long`."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked_runs
import numpy as np
import pytest
from adapter_runs import IMAGES, Place, assert_equal
from faulty_store import Faults, faulty_s3, s3  # noqa: F401 (fixtures)

from daguerre import errors
from daguerre.cli import main
from daguerre.data.cached.rows import Rows, files
from daguerre.data.cached.samples import Facts

pytestmark = pytest.mark.long

KILLS = 20
RECIPE = """
run_name: run
model: {family: KIND}
objective: {name: eps}
data: {source: folder, resolution: 16, caption_dropout: 0.3, random_flip: true, held_out_fraction: 0}
training: {duration: 4 steps, global_batch_size: 2, per_device_batch_size: 1}
lr_scheduler: {warmup: 0 steps}
checkpoint: {export: false}
sampling: {num_images: 0}
logging: {every: 1 steps, tensorboard: false}
"""
HALVES = {"images": 2 * IMAGES, "texts": IMAGES + 1}
"""Rows: each image also as its mirror image; the captions of all, and the empty one."""
SMALL = "cache.shard_mb=0.0001"
"""Every row is a file of its own, so that a kill finds many states."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("faults"), "sd", RECIPE)


@pytest.fixture(scope="module")
def whole(place) -> dict[str, Any]:
    """All that a quiet process makes."""
    assert filled(place, run(place, "quiet")) == [[0]]
    return contents(str(place.folder / "quiet"))


def run(place: Place, name: str, size: int = 1, **more: Any) -> dict[str, Any]:
    """Of `forked_runs`: `daguerre cache` into the folder of this name."""
    given = place.given(f"cache.path={place.folder / name}", SMALL, f"output_dir={place.folder}")
    arguments = ["cache", str(place.recipe), *given]
    return {"size": size, "arguments": arguments, "seen": str(place.folder / f"{name}.seen"), **more}


def filled(place: Place, *runs: dict[str, Any]) -> list[list[int]]:
    return forked_runs.together(place.folder, runs)


def contents(url: str, double: bool = False) -> dict[str, Any]:
    """All of a cache, whatever files it is in; fails where a row is there twice, unless `double`."""
    found: dict[str, Any] = {"facts": sorted(map(str, Facts(url)._noted.to_pylist()))}
    for name in _halves(url):
        rows = Rows.found(f"{url}/{name}")
        assert rows.damaged == []
        keys = [bytes(key).ljust(16, b"\0") for key in rows.keys]
        assert double or len(set(keys)) == len(keys) == HALVES[name.partition("-")[0]]
        found[name] = {key: {n: array.tobytes() for n, array in rows.read(key).items()} for key in keys}
    assert len(found) == 3
    return found


def _halves(url: str) -> list[str]:
    return sorted({name.partition("/")[0] for name in _names(url) if name.endswith("encoder.json")})


def _names(url: str) -> list[str]:
    if "://" in url:
        return files(url, "")
    return [path.relative_to(url).as_posix() for path in Path(url).rglob("*")]


@pytest.mark.parametrize("size", [1, 2])
def test_killed_at_random_moments_and_begun_again_all_is_there_once(place, whole, size):
    """SIGKILL to all processes, then the same command, by one process or by two."""
    moments, folders = random.Random(size), [str(place.folder / f"killed{number}") for number in range(KILLS)]
    kills = [moments.randint(1, 2 * sum(HALVES.values()) // size) for _ in range(KILLS)]
    runs = [
        run(place, Path(folder).name, size, kill=kill, **{"in": folder})
        for folder, kill in zip(folders, kills, strict=True)
    ]
    assert filled(place, *runs) == [[-9] * size] * KILLS
    states = [len(_names(folder)) for folder in folders]
    resumed = filled(place, *(run(place, f"killed{number}", 3 - size) for number in range(KILLS)))
    assert resumed == [[0] * (3 - size)] * KILLS
    for folder in folders:
        assert contents(folder) == whole
        shutil.rmtree(folder)
    print(f"files that {KILLS} kills left: {sorted(states)}")
    assert len(set(states)) > 5


def test_what_processes_make_together_is_what_one_makes(place, whole):
    assert filled(place, run(place, "two", 2), run(place, "three", 3)) == [[0] * 2, [0] * 3]
    for name in ("two", "three"):
        assert contents(str(place.folder / name)) == whole
        said = [Path(f"{place.folder / name}.seen.log-{rank}").read_text() for rank in range(2)]
        assert all("cached " in each for each in said)  # both had a share


def test_two_that_do_not_know_of_each_other_hurt_nothing(place, whole):
    """Two commands on one cache at a time may encode a row each, and it is the same one."""
    command = [sys.executable, "-m", "daguerre", *run(place, "apart")["arguments"]]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    for process in both:
        said, _ = process.communicate(timeout=500)
        assert process.returncode == 0, said
    found = contents(str(place.folder / "apart"), double=True)
    assert {**found, "facts": 0} == {**whole, "facts": 0}


def test_a_store_that_fails_a_fifth_of_all_requests(place, whole, faulty_s3):  # noqa: F811
    """Filled and trained on: rows, losses and weights are those of a cache on the disk."""
    faulty_s3.proxy.faults = Faults(share=0.2)
    url = f"s3://{faulty_s3.bucket}/cache"
    given = [f"output_dir={place.folder}", *place.given(f"cache.path={url}", "cache.shard_mb=0.01")]
    assert main.run(["cache", str(place.recipe), *given]) == errors.DONE
    assert contents(url) == whole
    assert place.train("near", f"cache.path={place.folder / 'quiet'}") == errors.DONE
    assert place.train("far", f"cache.path={url}", "cache.shard_mb=0.01") == errors.DONE
    assert place.numbers("far", "learning/loss") == place.numbers("near", "learning/loss")
    assert_equal(place.tensors("far"), place.tensors("near"))
    assert main.run(["cache", "verify", str(place.recipe), *given, "rows=4"]) == errors.DONE
    seen = faulty_s3.proxy.seen
    hurt = [one for one in seen if one.fault]
    print(f"{len(hurt)} of {len(seen)} requests failed: {json.dumps(np.unique([h.fault for h in hurt]).tolist())}")
    assert len(hurt) > 10
