"""SIGKILL at random moments: every run recovers and ends equal to the bit. Minutes: `make test-long`."""

import random
import shutil
import subprocess
import time

import pytest
import tiny_runs
from tiny_runs import assert_equal, outcome

from daguerre import errors

LONGER = [
    "training.duration=40 steps",
    "checkpoint.every=5 steps",
    "validation.every=10 steps",
    "logging.every=3 steps",
]
KILLS_A_RUN = 4

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The outcome of an uninterrupted run, and its seconds."""
    folder = tmp_path_factory.mktemp("whole")
    began = time.monotonic()
    process = tiny_runs.start(folder, *LONGER)
    said, _ = process.communicate()
    assert process.returncode == errors.DONE, said
    return outcome(folder / "tiny"), time.monotonic() - began


@pytest.mark.parametrize(("seed", "workers"), [(0, 0), (1, 1), (2, 3), (3, 0), (4, 1)])
def test_killed_at_random_moments_it_ends_equal_to_the_bit(tmp_path, whole, seed, workers):
    """Four kills a run, twenty in all, with 0, 1 and 3 loader workers."""
    expected, seconds = whole
    moments = random.Random(seed)
    killed = 0
    while killed < KILLS_A_RUN:
        process = tiny_runs.start(tmp_path, *LONGER, f"loader.num_workers={workers}")
        try:
            said, _ = process.communicate(timeout=moments.uniform(0.2, 0.9) * seconds)
            assert process.returncode == errors.DONE, said
            assert_equal(tmp_path / "tiny", expected)
            shutil.rmtree(tmp_path / "tiny")  # finished before its last kill: once more from the start
        except subprocess.TimeoutExpired:
            tiny_runs.kill(process)
            killed += 1
    process = tiny_runs.start(tmp_path, *LONGER, f"loader.num_workers={workers}")
    said, _ = process.communicate()
    assert process.returncode == errors.DONE, said
    assert_equal(tmp_path / "tiny", expected)
