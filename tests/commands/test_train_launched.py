"""`daguerre train` by launchers: signals, processes that die or stand still, and jobs that queue again."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import tiny_runs
from launched import Launched, Queue
from tiny_runs import assert_equal, outcome

from daguerre import cli, errors

LONGER = (
    "training.duration=40 steps",
    "checkpoint.every=20 steps",
    "validation.every=20 steps",
    "logging.every=2 steps",
)


def status(folder: Path) -> dict:
    return json.loads((folder / "tiny" / "status.json").read_text())


def uninterrupted(folder: Path, size: int, *overrides: str) -> dict:
    """What a run of so many processes comes to."""
    with Launched(folder, size, *LONGER, *overrides) as run:
        assert run.codes(300) == [errors.DONE] * size, run.log()
    return outcome(folder / "tiny")


def forget_the_stop(folder: Path, expected: dict) -> None:
    """Removes the pictures that a stop adds."""
    known = {Path(name).parts[1] for name in expected["files"] if name.startswith("samples/")}
    for drawn in (folder / "tiny" / "samples").iterdir():
        if drawn.name not in known:
            shutil.rmtree(drawn)


@pytest.mark.long
@pytest.mark.parametrize("tasks", [1, 2])
def test_a_job_whose_time_is_up_goes_on_by_itself(tmp_path: Path, tasks: int):
    """From `daguerre launch slurm` to the end of the run, over two turns that are cut short."""
    words = tiny_runs.arguments(tmp_path / "runs", *LONGER)[1:]
    own = ["gpus_per_node=0", f"tasks_per_node={tasks}", "cpus_per_task=1", f"out={tmp_path / 'run.sbatch'}"]
    assert cli.run(["launch", "slurm", *words, "num_workers=0", *own, f"python={sys.executable}"]) == 0
    job = Queue(tmp_path, tmp_path / "run.sbatch", 1, tasks)
    steps = []
    for _ in range(2):
        process = job.turn()
        numbers = tmp_path / "runs" / "tiny" / "metrics" / "metrics.jsonl"
        tiny_runs.wait_for(numbers)
        seen = numbers.stat().st_size
        while numbers.stat().st_size == seen:
            time.sleep(0.02)
            assert process.poll() is None, job.log()
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == errors.PREEMPTED, job.log()
        assert job.asked_again()
        said = status(tmp_path / "runs")
        assert (said["state"], said["reason"]) == ("saved", "stopped by SIGUSR1")
        steps.append(said["step"])
    assert 0 < steps[0] < steps[1] < 30
    assert job.turn().wait(120) == 0, job.log()
    assert f"going on from step-{steps[1]:08d}" in job.log()
    assert not job.asked_again()
    assert status(tmp_path / "runs")["state"] == "finished"
    expected = uninterrupted(tmp_path / "whole", tasks)
    forget_the_stop(tmp_path / "runs", expected)
    assert_equal(tmp_path / "runs" / "tiny", expected)
