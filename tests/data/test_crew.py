"""Jobs in processes: every result once, counts on the way, errors as they are, no process that outlives its parent."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
from quick_cases import quick_where

from daguerre.data.loading import job_pool
from daguerre.errors import ProcessLost, UserError
from daguerre.storage.errors import Missing
from daguerre.storage.location import Location


@dataclass(frozen=True)
class Squares:
    """Yields each number in two counts, fails where it is told to."""

    fail_at: int = -1
    how: str = "user"

    def __call__(self, job):
        yield 1
        if job == self.fail_at and self.how == "user":
            raise UserError(f"{job} cannot be")
        if job == self.fail_at and self.how == "store":
            raise Missing(Location("s3://bucket/key"), "is gone")
        if job == self.fail_at and self.how == "reset":
            raise ConnectionResetError(104, "reset by the network")
        if job == self.fail_at:
            os.kill(os.getpid(), signal.SIGKILL)
        yield 1
        return job**2, os.getpid()


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Workers import this file by its name, as it stands on sys.path."""
    monkeypatch.syspath_prepend(os.path.dirname(__file__))


def run(task, jobs, processes):
    steps = list(job_pool.run_jobs(task, jobs, processes))
    done = {step.job: step.result for step in steps if isinstance(step, job_pool.Done)}
    return done, sum(step for step in steps if isinstance(step, int))


@pytest.mark.parametrize("processes", [1, 3])
def test_each_job_is_done_once_and_counted(processes):
    done, counted = run(Squares(), range(10), processes)
    assert {job: square for job, (square, _) in done.items()} == {job: job**2 for job in range(10)}
    assert counted == 20
    own = {pid for _, pid in done.values()} == {os.getpid()}
    assert own == (processes == 1)
    assert run(Squares(), [], processes) == ({}, 0)


def test_one_job_needs_no_process():
    done, _ = run(Squares(), [3], 4)
    assert done == {3: (9, os.getpid())}


@pytest.mark.parametrize(
    ("processes", "how", "error"),
    quick_where(
        lambda case: case[0] == 1 or case[1] == "store",
        [
            (processes, how, error)
            for how, error in (("user", UserError), ("store", Missing), ("reset", ConnectionResetError))
            for processes in (1, 2)
        ],
    ),
)
def test_what_a_job_raises_comes_out_here(processes, how, error):
    with pytest.raises(error):
        run(Squares(4, how), range(8), processes)


def test_a_worker_that_is_killed_is_said():
    with pytest.raises(ProcessLost, match="killed by signal 9"):
        run(Squares(1, "kill"), range(4), 2)


def test_workers_end_with_a_parent_that_is_killed():
    code = (
        "import sys, time\n"
        "from daguerre.data.loading import job_pool as crew\n"
        "from test_crew import Squares\n"
        "steps = crew.run_jobs(Squares(), range(1000000), 2)\n"
        "for step in steps:\n"
        "    if isinstance(step, crew.Done):\n"
        "        print(step.result[1], flush=True); time.sleep(0.01)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{worker}"):
        assert time.monotonic() < deadline, "the worker is still there"
        time.sleep(0.05)
