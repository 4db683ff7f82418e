"""The processes of the loader: they end with their trainer however it ends, and their errors come out in it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from daguerre.data.dataset import ReadRequest, open_dataset
from daguerre.data.loading.collate import Collator, Task
from daguerre.data.loading.loader import Loading
from daguerre.data.loading.processes import Worker
from daguerre.data.loading.workers import _received, _send, made_by, workers
from daguerre.data.plan.buckets import Bucket
from daguerre.data.settings import LoaderSettings
from daguerre.data.skipped import Failure
from daguerre.data.sources import folder
from daguerre.errors import ProcessLost, UserError
from daguerre.types import Batch

TRAINER = """
import sys, time
from daguerre.data.dataset import ReadRequest, open_dataset
from daguerre.data.loading.loader import Loading
from daguerre.data.loading.collate import Collator
from daguerre.data.plan.buckets import Bucket
from daguerre.data.settings import LoaderSettings
from daguerre.data.sources import folder
from daguerre.data.loading.workers import made_by, workers

dataset = open_dataset(folder.Settings(path=sys.argv[1], resolution=16), "train")
tasks = (task for task, _ in Loading(dataset, LoaderSettings(), 0, 4, 4, None, None).tasks(0))
try:
    with workers(Collator(dataset.members, 0), 2) as crew:
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
def trainer(image_folder):
    """Starts a process with two workers; gives it and the workers' ids."""
    started = []

    def start(stage):
        command = [sys.executable, "-c", TRAINER, str(image_folder), stage]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process, [int(pid) for pid in process.stdout.readline().split()]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def work(image_folder: Path) -> tuple[Collator, Iterator[Task]]:
    settings = folder.Settings(path=str(image_folder), resolution=16, held_out_fraction=0, shuffle=False)
    loading = Loading(open_dataset(settings, "train"), LoaderSettings(), 0, 4, 4, None, None)
    return Collator(loading.dataset.members, 0), (task for task, _ in loading.tasks(0))


def batch_of(parts) -> Batch:
    """The only one of a task."""
    ((_, (batch, _)),) = parts
    return batch


def test_a_batch_arrives_as_it_was_sent():
    """Every field, of whatever type, with its layout in memory; empty ones and those that are not dense too."""
    pixels_BHWC = torch.arange(2 * 4 * 5 * 3, dtype=torch.uint8).reshape(2, 4, 5, 3)
    sent = Batch(
        np.arange(6).reshape(2, 3),
        {"image": pixels_BHWC.permute(0, 3, 1, 2), "mask": torch.full((2, 4, 5, 1), 7).byte().permute(0, 3, 1, 2)},
        ["a", ""],
        torch.tensor([1.0, 0.0]),
        ["x", "y"],
        np.ones((2, 6), np.int32),
        {"noise": torch.randn(2, 3)},
        torch.tensor([0.5, 2.0]),
        {
            "half": torch.randn(2, 3, 5).bfloat16(),
            "on": torch.tensor([[True], [False]]),
            "none": torch.zeros(2, 0, 4, dtype=torch.int64),
            "part": torch.arange(20.0).reshape(2, 10)[:, ::3],
        },
    )
    ours, theirs = Pipe()
    task = Task(ReadRequest(np.zeros(2, np.int64), np.arange(2), sent.keys), Bucket(4, 5))
    sender = threading.Thread(target=_send, args=(theirs, [(task, (sent, [Failure(1, "y", "why")]))]))
    sender.start()
    ((of, (got, failures)),) = _received(Worker(None, ours))
    sender.join()
    assert of.bucket == task.bucket
    assert of.reads.numbers.tolist() == [0, 1]
    assert failures == [Failure(1, "y", "why")]
    assert (got.texts, got.names) == (sent.texts, sent.names)
    for name in ("keys", "sizes", "valid_B", "weights_B"):
        assert np.array_equal(getattr(got, name), getattr(sent, name))
    for name in ("images", "draws", "features"):
        there, here = getattr(sent, name), getattr(got, name)
        assert list(here) == list(there)
        assert all(torch.equal(here[key], there[key]) and here[key].dtype == there[key].dtype for key in there)
    assert got.pixels_BCHW.stride() == sent.pixels_BCHW.stride()  # channels last


def test_rows_of_a_batch_are_of_every_field():
    every = {"keys": np.arange(9).reshape(3, 3), "images": {"image": torch.arange(3)}, "texts": ["a", "b", "c"]}
    every |= {"valid_B": torch.ones(3), "names": ["x", "y", "z"], "sizes": np.zeros((3, 6)), "weights_B": None}
    every |= {"draws": {"noise": torch.arange(3)}, "features": {"text": torch.arange(6).reshape(3, 2)}}
    every |= {"columns": {"reward": torch.tensor([0.5, 1.5, 2.5])}}
    every |= {"sizes_of": {"rejected": np.arange(18).reshape(3, 6)}}
    assert every.keys() == {field.name for field in fields(Batch)}
    part = Batch(**every).rows(1, 3)
    assert part.keys.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert (part.texts, part.names, part.weights_B) == (["b", "c"], ["y", "z"], None)
    assert (len(part.valid_B), len(part.sizes)) == (2, 2)
    assert part.images["image"].tolist() == part.draws["noise"].tolist() == [1, 2]
    assert part.features["text"].tolist() == [[2, 3], [4, 5]]
    assert part.columns["reward"].tolist() == [1.5, 2.5]
    assert part.sizes_of["rejected"].tolist() == np.arange(6, 18).reshape(2, 6).tolist()


@dataclass(frozen=True)
class Cached:
    """The records of a source, each with features that were computed before."""

    source: Any

    def features(self, height_px, width_px):
        return {"latent": np.zeros((2, 3), np.float16)}

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "source"), name)

    def record(self, number):
        return replace(self.source.record(number), features=Features(number))


@dataclass(frozen=True)
class Features:
    """Those of one record."""

    number: int

    def of(self, frames, text):
        assert (frames["image"].height_px, text) == (16, f"image {self.number}")
        return {"latent": np.full((2, 3), self.number, np.float16)}


def test_cached_features_come_with_their_samples_and_are_zero_in_empty_slots(image_folder):
    rows, tasks = work(image_folder)
    (image_folder / rows.members[0].source.name(2)).write_bytes(b"broken")
    members = tuple(member._replace(source=Cached(member.source)) for member in rows.members)
    batch, failures = Collator(members, 0).collate(next(tasks))
    assert [failure.row for failure in failures] == [2]
    assert batch.features["latent"].dtype == torch.float16
    assert batch.features["latent"][:, 1, 2].tolist() == [0, 1, 0, 3]


def test_sources_of_other_features_do_not_mix(image_folder):
    rows, tasks = work(image_folder)
    (member,) = rows.members
    with pytest.raises(UserError, match="cached features"):
        Collator((member._replace(source=Cached(member.source)), member), 0).collate(next(tasks))


@pytest.mark.long
def test_workers_die_with_a_killed_trainer(trainer):
    process, pids = trainer("running")
    assert len(pids) == 2
    process.kill()
    assert gone(pids)


@pytest.mark.long
@pytest.mark.parametrize("stage", ["running", "starting"])
def test_ctrl_c_reaches_the_trainer_alone(trainer, stage):
    process, pids = trainer(stage)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert out == "saved\n"
    assert err == ""
    assert process.returncode == 0
    assert gone(pids)


@pytest.mark.long
def test_a_scheduler_that_ends_every_process_leaves_workers_to_the_trainer(image_folder):
    rows, tasks = work(image_folder)
    with workers(rows, 1) as crew:
        made = made_by(crew, tasks, 1)
        next(made)
        crew[0].process.send_signal(signal.SIGTERM)
        crew[0].process.send_signal(signal.SIGINT)
        crew[0].process.send_signal(signal.SIGUSR1)
        assert len(batch_of(next(made)).names) == 4
    assert crew[0].process.returncode == -signal.SIGKILL


def test_a_worker_that_was_killed_says_by_what(image_folder):
    rows, tasks = work(image_folder)
    with workers(rows, 1) as crew:
        crew[0].process.kill()
        with pytest.raises(ProcessLost, match="killed by signal 9"):
            for _ in made_by(crew, tasks, 1):
                pass


@pytest.mark.long  # of the quick tests, test_crew.py
def test_the_error_of_a_worker_is_the_trainers(image_folder):
    rows, tasks = work(image_folder)
    (image_folder / "001.png").unlink()
    with workers(rows, 1) as crew, pytest.raises(UserError, match=r"cannot be read, after 4 attempts.*001\.png"):
        next(made_by(crew, tasks, 1))


@pytest.mark.long
def test_many_tasks_beside_large_answers_do_not_block_each_other(image_folder):
    """More bytes of tasks than a socket holds, while the worker sends images: once both ends waited for ever."""
    settings = folder.Settings(path=str(image_folder), resolution=64, held_out_fraction=0, repeats=100)
    loading = Loading(open_dataset(settings, "train"), LoaderSettings(), 0, 512, 512, None, None)
    tasks = (task for task, _ in loading.tasks(0))
    with workers(Collator(loading.dataset.members, 0), 1) as crew:
        made = made_by(crew, tasks, 24)
        assert len(batch_of(next(made)).names) == 512
