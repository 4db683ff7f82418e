"""The processes of the loader: they end with their trainer however it ends, and their errors come out in it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from daguerre.data.dataset import open_dataset
from daguerre.data.loader import Loading
from daguerre.data.rows import Rows, Task
from daguerre.data.settings import LoaderSettings
from daguerre.data.sources import folder
from daguerre.data.workers import made_by, workers
from daguerre.errors import ProcessLost, UserError

TRAINER = """
import sys, time
from daguerre.data.dataset import open_dataset
from daguerre.data.loader import Loading
from daguerre.data.rows import Rows
from daguerre.data.settings import LoaderSettings
from daguerre.data.sources import folder
from daguerre.data.workers import made_by, workers

dataset = open_dataset(folder.Settings(path=sys.argv[1], resolution=16), "train")
tasks = (task for task, _ in Loading(dataset, LoaderSettings(), 0, 4, 4, None, None).tasks(0))
try:
    with workers(Rows(dataset.members, 0), 2) as crew:
        made = made_by(crew, tasks, 2)
        if sys.argv[2] == "running":
            next(made)
        print(*(worker.process.pid for worker in crew), flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("saved", flush=True)
"""


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def gone(pids: list[int], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.fixture
def trainer(pictures):
    """Starts a process with two workers; gives it and the workers' ids."""
    started = []

    def start(stage):
        command = [sys.executable, "-c", TRAINER, str(pictures), stage]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process, [int(pid) for pid in process.stdout.readline().split()]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def work(pictures: Path) -> tuple[Rows, Iterator[Task]]:
    settings = folder.Settings(path=str(pictures), resolution=16, held_out_fraction=0, shuffle=False)
    loading = Loading(open_dataset(settings, "train"), LoaderSettings(), 0, 4, 4, None, None)
    return Rows(loading.dataset.members, 0), (task for task, _ in loading.tasks(0))


def test_workers_die_with_a_killed_trainer(trainer):
    process, pids = trainer("running")
    assert len(pids) == 2
    process.kill()
    assert gone(pids)


@pytest.mark.parametrize("stage", ["running", "starting"])
def test_ctrl_c_reaches_the_trainer_alone(trainer, stage):
    process, pids = trainer(stage)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert out == "saved\n"
    assert err == ""
    assert process.returncode == 0
    assert gone(pids)


def test_a_scheduler_that_ends_every_process_leaves_workers_to_the_trainer(pictures):
    rows, tasks = work(pictures)
    with workers(rows, 1) as crew:
        made = made_by(crew, tasks, 1)
        next(made)
        crew[0].process.send_signal(signal.SIGTERM)
        crew[0].process.send_signal(signal.SIGINT)
        crew[0].process.send_signal(signal.SIGUSR1)
        assert len(next(made)[0].names) == 4
    assert crew[0].process.returncode == -signal.SIGKILL


def test_a_worker_that_was_killed_says_by_what(pictures):
    rows, tasks = work(pictures)
    with workers(rows, 1) as crew:
        crew[0].process.kill()
        with pytest.raises(ProcessLost, match="killed by signal 9"):
            for _ in made_by(crew, tasks, 1):
                pass


def test_the_error_of_a_worker_is_the_trainers(pictures):
    rows, tasks = work(pictures)
    (pictures / "001.png").unlink()
    with workers(rows, 1) as crew, pytest.raises(UserError, match=r"cannot be read, after 4 attempts.*001\.png"):
        next(made_by(crew, tasks, 1))


def test_many_tasks_beside_large_answers_do_not_block_each_other(pictures):
    """More bytes of tasks than a socket holds, while the worker sends pictures: once both ends waited for ever."""
    settings = folder.Settings(path=str(pictures), resolution=64, held_out_fraction=0, repeats=100)
    loading = Loading(open_dataset(settings, "train"), LoaderSettings(), 0, 512, 512, None, None)
    tasks = (task for task, _ in loading.tasks(0))
    with workers(Rows(loading.dataset.members, 0), 1) as crew:
        made = made_by(crew, tasks, 24)
        assert [len(next(made)[0].names) for _ in range(3)] == [512] * 3
