"""A trial of a training: its figures are the run's own, and nothing of it is left, whatever happens."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest
import tiny_runs

from daguerre.errors import UserError
from daguerre.serve.queueing import trial

METRICS = ".trial-*/trial/metrics/*"
FAKE = """
    import json, os, sys, time
    given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    run = os.path.join(given["output_dir"], given["run_name"])
    os.makedirs(os.path.join(run, "metrics"))
    with open(os.path.join(run, "status.json"), "w") as file:
        json.dump({"state": "running", "total_steps": 3600}, file)
    open("pid", "w").write(str(os.getpid()))
    with open(os.path.join(run, "metrics", "metrics.jsonl"), "w") as file:
        for step in range(1, int(given["writes"]) + 1):
            line = {"step": step, "samples": step, "perf/step_time_seconds": 9.0 if step < 3 else 2.0 + step / 1e3}
            file.write(json.dumps(line | {"memory/peak_bytes": 1000 + step}) + "\\n")
            file.flush()
    if given["then"] == "ends":
        sys.exit("daguerre: out of memory")
    time.sleep(60)
"""


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "fake.py"
    path.write_text(textwrap.dedent(FAKE))
    return (sys.executable, "-S", "-E", str(path))


def left(folder: Path) -> list[str]:
    """All that lies in the folder but what was there; the process must have ended."""
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), 0)
    return sorted(path.name for path in folder.iterdir() if path.name not in ("fake.py", "pid"))


def test_the_first_updates_are_measured_and_nothing_is_left(tmp_path: Path, program: tuple[str, ...]) -> None:
    found = trial.tried(["x", "writes=11", "then=waits"], tmp_path, program=program)
    assert found.seconds_per_update == pytest.approx(2.007, abs=2e-3), "but for the first two"
    assert found.peak_bytes in (1010, 1011)
    assert found.hours == pytest.approx(3600 * found.seconds_per_update / 3600)
    assert left(tmp_path) == []


def test_a_training_that_is_shorter_or_fails_says_so(tmp_path: Path, program: tuple[str, ...]) -> None:
    found = trial.tried(["x", "writes=4", "then=ends"], tmp_path, program=program)
    assert found.seconds_per_update == pytest.approx(2.0035)
    with pytest.raises(UserError, match=r"^out of memory$"):
        trial.tried(["x", "writes=0", "then=ends"], tmp_path, program=program)
    assert left(tmp_path) == []


def test_one_that_is_given_up_is_killed(tmp_path: Path, program: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="given up after 5 of 10 updates"):
        trial.tried(
            ["x", "writes=5", "then=waits"],
            tmp_path,
            stopping=lambda: any(path.read_bytes().count(b"\n") == 5 for path in tmp_path.glob(METRICS)),
            program=program,
        )
    assert left(tmp_path) == []


@pytest.mark.long
def test_a_real_training_is_tried(tmp_path: Path) -> None:
    found = trial.tried(["quickstart", *tiny_runs.TINY, "training.duration=20k steps"], tmp_path)
    assert found.total_steps == 20_000
    assert found.seconds_per_update > 0
    assert found.peak_bytes > 100e6
    assert [*tmp_path.iterdir()] == []
