"""A pool of processes that runs one task over many jobs, for packing, indexing and checking, not for training.

Workers ignore the signals of a terminal. Results come in the order in which they are done.
"""

import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from daguerre import system
from daguerre.data.loading.processes import Worker, started
from daguerre.errors import UserError

Job = TypeVar("Job")
Result = TypeVar("Result")
Task = Callable[[Job], Generator[int, None, Result]]
"""Yields how many samples were done since it last yielded, returns its result. It travels to the workers: a function
of a module, or a small frozen dataclass with `__call__`."""


@dataclass(frozen=True)
class Done(Generic[Job, Result]):
    """A job and its result."""

    job: Job
    result: Result


@dataclass(frozen=True)
class _Failed:
    error: UserError | OSError


def usual_processes() -> int:
    """As many processes as there are cores that this process may use, 16 at most."""
    return min(16, system.cores())


def run_jobs(task: Task[Job, Result], jobs: Iterable[Job], processes: int) -> Iterator[int | Done[Job, Result]]:
    """Runs all jobs: yields counts of samples as they are done, and each job with its result.

    With one process (or one job) everything happens in this one. UserError and OSError of a task are raised here and
    end the others.
    """
    listed = list(jobs)
    if min(processes, len(listed)) <= 1:
        for job in listed:
            yield Done(job, (yield from task(job)))
        return
    ignored = [signal.SIGINT, signal.SIGUSR1]
    with started(__name__, task, min(processes, len(listed)), ignored, "worker process", "processes=1") as pool:
        waiting = iter(listed)
        busy: dict[Any, tuple[Worker, Job]] = {}
        for worker, job in zip(pool, waiting, strict=False):
            _give(worker, job, busy)
        while busy:
            for pipe in wait(list(busy)):
                worker, job = busy[pipe]
                with worker.connected():
                    answer = worker.pipe.recv()
                if isinstance(answer, _Failed):
                    raise answer.error
                if isinstance(answer, int):
                    yield answer
                    continue
                del busy[pipe]
                for following in waiting:
                    _give(worker, following, busy)
                    break
                yield Done(job, answer[0])


def results(steps: Iterable[int | Done[Job, Result]], count: Callable[[int], None]) -> Iterator[Result]:
    """The results of `run_jobs`; its counts of samples go to `count`."""
    for step in steps:
        if isinstance(step, int):
            count(step)
        else:
            yield step.result


def _give(worker: Worker, job: Job, busy: dict[Any, tuple[Worker, Job]]) -> None:
    with worker.connected():
        worker.pipe.send(job)
    busy[worker.pipe] = worker, job


def worker_main(descriptor: int) -> None:
    """Runs in a worker: a task comes in, then jobs; counts and results go out, until the other end closes."""
    pipe = Connection(descriptor)
    with suppress(EOFError, ConnectionError):
        task = pipe.recv()
        while True:
            for answer in _answers(task(pipe.recv())):
                pipe.send(answer)


def _answers(steps: Generator[int, None, Any]) -> Iterator[Any]:
    """The answers to a job: counts, then its result in a tuple, or the error."""
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
