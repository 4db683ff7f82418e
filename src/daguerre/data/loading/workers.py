"""Processes that make micro-batches, each on its own end of a socket: both sides of that socket, and nothing else.

A worker ignores the signals of a terminal or a scheduler and ends when its socket does: with its trainer, however that
ended. How a process is started is `data/loading/processes.py`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from itertools import islice
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from daguerre.data.loading.collate import Made, Rows, Task
from daguerre.data.loading.processes import Worker, started
from daguerre.errors import ProcessLost, UserError


def workers(rows: Rows, number: int) -> AbstractContextManager[list[Worker]]:
    """`number` processes that know `rows`, as long as the block runs; a scheduler's signal is the trainer's affair."""
    return started("workers", rows, number, [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM])


def made_by(crew: list[Worker], tasks: Iterator[Task], ahead: int) -> Iterator[Made]:
    """The micro-batches of an endless run of tasks, in order; each worker makes every len(crew)-th, at most `ahead` at
    once."""
    for number, task in enumerate(islice(tasks, len(crew) * ahead)):
        _ask(crew[number % len(crew)], task)
    for number, task in enumerate(tasks):
        worker = crew[number % len(crew)]
        made = _received(worker)
        _ask(worker, task)
        yield made


def serve(descriptor: int) -> None:
    """The life of a worker: tasks in, micro-batches out, until the other end closes."""
    torch.set_num_threads(1)
    pipe = Connection(descriptor)
    tasks: SimpleQueue[tuple[Rows, Task] | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, tasks), daemon=True).start()
    while (asked := tasks.get()) is not None:
        rows, task = asked
        try:
            answer: Made | UserError = rows.made(task)
        except UserError as error:
            answer = error
        with suppress(ConnectionError):
            _send(pipe, answer)


def _listen(pipe: Connection, tasks: SimpleQueue[tuple[Rows, Task] | None]) -> None:
    """Takes tasks in as they come, also while an answer is on its way: else both ends could wait for each other, each
    with its socket full."""
    with suppress(EOFError, OSError):
        rows: Rows = pipe.recv()
        while True:
            tasks.put((rows, pipe.recv()))
    tasks.put(None)


def _send(pipe: Connection, answer: Made | UserError) -> None:
    if isinstance(answer, UserError):
        pipe.send(answer)
        return
    batch, failures = answer
    follow: list[Tensor] = []

    def taken_out(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        order = sorted(range(value.ndim), key=value.stride, reverse=True)
        follow.append(value.permute(order).contiguous())
        return _Follows(value.dtype, tuple(follow[-1].shape), tuple(np.argsort(order).tolist()))

    pipe.send((batch.map(taken_out, host=taken_out), failures))
    for tensor in follow:
        pipe.send_bytes(_memory(tensor))


class _Follows(NamedTuple):
    """In the place of a tensor, whose memory follows as it is: tensors are pickled by files, which are few."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """As the dims lie in memory."""
    order: tuple[int, ...]
    """How they are permuted."""


def _memory(tensor: Tensor) -> memoryview:
    """Of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _ask(worker: Worker, task: Task) -> None:
    try:
        worker.pipe.send(task)
    except ConnectionError as error:
        raise ProcessLost(_ended(worker)) from error


def _received(worker: Worker) -> Made:
    try:
        answer = worker.pipe.recv()
        if isinstance(answer, UserError):
            raise answer
        batch, failures = answer

        def put_back(value: Any) -> Any:
            if not isinstance(value, _Follows):
                return value
            tensor = torch.empty(value.shape, dtype=value.dtype)
            worker.pipe.recv_bytes_into(_memory(tensor))
            return tensor.permute(value.order)

        return batch.map(put_back, host=put_back), failures
    except (EOFError, ConnectionError) as error:
        raise ProcessLost(_ended(worker)) from error


def _ended(worker: Worker) -> str:
    why = f"a loader process {worker.ended()}; what it said of the error stands above."
    return f"{why} loader.num_workers=0 works without them"
