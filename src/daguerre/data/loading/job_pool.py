"""One task over many jobs, in processes of their own: for packing, indexing and checking, not for training.

A worker ignores the signals of a terminal and ends when its socket does, with its parent, however that ended; how it is
started is `data/loading/processes.py`. Results come in the order in which they are done.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from daguerre.data.loading.processes import Worker, started
from daguerre.errors import ProcessLost, UserError

Job = TypeVar("Job")
Result = TypeVar("Result")
Task = Callable[[Job], Generator[int, None, Result]]
"""Yields how many samples were done since it last yielded, returns its result. It travels to the workers: a function
of a module, or a small frozen dataclass with `__call__`."""


@dataclass(frozen=True)
class Done(Generic[Job, Result]):
    """A job and what came of it."""

    job: Job
    result: Result


@dataclass(frozen=True)
class _Failed:
    error: UserError | OSError


def usual_processes() -> int:
    """As many processes as there are cores that this process may use, 16 at most."""
    return min(16, len(os.sched_getaffinity(0)))


def work(task: Task[Job, Result], jobs: Iterable[Job], processes: int) -> Iterator[int | Done[Job, Result]]:
    """Does all jobs: yields counts of samples as they are done, and each job with its result.

    With one process (or one job) everything happens in this one. UserError and OSError of a task come out here and end
    the others.
    """
    listed = list(jobs)
    if min(processes, len(listed)) <= 1:
        for job in listed:
            yield Done(job, (yield from task(job)))
        return
    with started("job_pool", task, min(processes, len(listed)), [signal.SIGINT, signal.SIGUSR1]) as crew:
        waiting = iter(listed)
        busy: dict[Any, tuple[Worker, Job]] = {}
        for worker in crew:
            _give(worker, next(waiting), busy)
        while busy:
            for pipe in wait(list(busy)):
                worker, job = busy[pipe]
                answer = _received(worker)
                if isinstance(answer, int):
                    yield answer
                    continue
                del busy[pipe]
                for following in waiting:
                    _give(worker, following, busy)
                    break
                yield Done(job, answer[0])


def serve(descriptor: int) -> None:
    """The life of a worker: a task, then jobs in, counts and results out, until the other end closes."""
    pipe = Connection(descriptor)
    with suppress(EOFError, ConnectionError):
        task = pipe.recv()
        while True:
            for answer in _answers(task(pipe.recv())):
                pipe.send(answer)


def _answers(steps: Generator[int, None, Any]) -> Iterator[Any]:
    """What a worker says of a job: counts, then its result in a tuple, or what it failed of."""
    while True:
        try:
            step = next(steps)
        except StopIteration as stop:
            yield (stop.value,)
            return
        except (UserError, OSError) as error:
            yield _Failed(error)
            return
        yield step


def _give(worker: Worker, job: Job, busy: dict[Any, tuple[Worker, Job]]) -> None:
    try:
        worker.pipe.send(job)
    except ConnectionError as error:
        raise ProcessLost(_ended(worker)) from error
    busy[worker.pipe] = worker, job


def _received(worker: Worker) -> Any:
    """A count, or a result in a tuple of its own; raises what the task raised."""
    try:
        answer = worker.pipe.recv()
    except (EOFError, ConnectionError) as error:
        raise ProcessLost(_ended(worker)) from error
    if isinstance(answer, _Failed):
        raise answer.error
    return answer


def _ended(worker: Worker) -> str:
    why = f"a worker process {worker.ended()}; what it said of the error stands above."
    return f"{why} processes=1 works without them"
