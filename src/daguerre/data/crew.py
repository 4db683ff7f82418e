"""One task over many jobs, in processes of their own: for packing, indexing and checking, not for training.

A worker is a fresh interpreter, as in `workers.py`: it ignores the signals of a terminal and ends when its socket does,
with its parent, however that ended. Results come in the order in which they are done.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from daguerre.errors import UserError

Job = TypeVar("Job")
Result = TypeVar("Result")
Task = Callable[[Job], Generator[int, None, Result]]
"""Yields how many samples were done since it last yielded, returns its result. It travels to the workers: a function
of a module, or a small frozen dataclass with `__call__`."""

_START = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = sys.argv[2:]
from daguerre.data.crew import serve
serve(int(sys.argv[1]))
"""


@dataclass(frozen=True)
class Done(Generic[Job, Result]):
    """A job and what came of it."""

    job: Job
    result: Result


@dataclass(frozen=True)
class _Failed:
    error: UserError | OSError


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection


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
    with _crew(task, min(processes, len(listed))) as crew:
        waiting = iter(listed)
        busy: dict[Any, tuple[_Worker, Job]] = {}
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


@contextmanager
def _crew(task: object, number: int) -> Iterator[list[_Worker]]:
    """Processes that know the task; they are killed at the end of the block, as what they were at is done again."""
    crew: list[_Worker] = []
    try:
        for _ in range(number):
            crew.append(_started())
        for worker in crew:
            worker.pipe.send(task)
        yield crew
    finally:
        for worker in crew:
            worker.process.kill()
        for worker in crew:
            worker.process.wait()
            worker.pipe.close()


def _started() -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno()), *sys.path],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            process_group=0,  # Ctrl-C goes to the command alone, which ends its workers
        )
    return _Worker(process, Connection(ours.detach()))


def _give(worker: _Worker, job: Job, busy: dict[Any, tuple[_Worker, Job]]) -> None:
    try:
        worker.pipe.send(job)
    except ConnectionError as error:
        raise RuntimeError(_ended(worker)) from error
    busy[worker.pipe] = worker, job


def _received(worker: _Worker) -> Any:
    """A count, or a result in a tuple of its own; raises what the task raised."""
    try:
        answer = worker.pipe.recv()
    except (EOFError, ConnectionError) as error:
        raise RuntimeError(_ended(worker)) from error
    if isinstance(answer, _Failed):
        raise answer.error
    return answer


def _ended(worker: _Worker) -> str:
    code = worker.process.wait()
    why = f"was killed by signal {-code} (9 is often the system being out of memory)" if code < 0 else f"exited {code}"
    return f"a worker process {why}; what it said of the error stands above. processes=1 works without them"
