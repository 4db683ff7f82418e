"""Loader worker processes that collate micro-batches: the protocol over their sockets, both ends.

A worker ignores the signals of a terminal or a scheduler.
"""

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

from daguerre.data.loading import layouts
from daguerre.data.loading.collate import Collator, Task
from daguerre.data.loading.layouts import Part
from daguerre.data.loading.processes import Worker, started
from daguerre.errors import UserError


def workers(collator: Collator, count: int) -> AbstractContextManager[list[Worker]]:
    """`count` processes that have the collator, while the block runs."""
    ignored = [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM]
    return started(__name__, collator, count, ignored, "loader process", "loader.num_workers=0")


def made_by(pool: list[Worker], tasks: Iterator[Task], prefetch: int) -> Iterator[list[Part]]:
    """The micro-batches of endless tasks, in order; each worker makes every len(pool)-th, `prefetch` at once."""
    for i, task in enumerate(islice(tasks, len(pool) * prefetch)):
        _ask(pool[i % len(pool)], task)
    for i, task in enumerate(tasks):
        worker = pool[i % len(pool)]
        collated = _received(worker)
        _ask(worker, task)
        yield collated


def _ask(worker: Worker, task: Task) -> None:
    with worker.connected():
        worker.pipe.send(task)


def worker_main(descriptor: int) -> None:
    """Runs in a worker: tasks come in, micro-batches go out, until the other end closes."""
    torch.set_num_threads(1)
    pipe = Connection(descriptor)
    tasks: SimpleQueue[tuple[Collator, Task] | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, tasks), daemon=True).start()
    while (asked := tasks.get()) is not None:
        collator, task = asked
        try:
            answer: list[Part] | UserError = layouts.parts(collator, task)
        except UserError as error:
            answer = error
        with suppress(ConnectionError):
            _send(pipe, answer)


def _listen(pipe: Connection, tasks: SimpleQueue[tuple[Collator, Task] | None]) -> None:
    """Receives tasks also while an answer is sent: else both ends could wait for each other with their sockets full."""
    with suppress(EOFError, OSError):
        collator: Collator = pipe.recv()
        while True:
            tasks.put((collator, pipe.recv()))
    tasks.put(None)


def _send(pipe: Connection, answer: list[Part] | UserError) -> None:
    if isinstance(answer, UserError):
        pipe.send(answer)
        return
    follow: list[Tensor] = []

    def taken_out(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        order = sorted(range(value.ndim), key=value.stride, reverse=True)
        follow.append(value.permute(order).contiguous())
        return _Follows(value.dtype, tuple(follow[-1].shape), tuple(np.argsort(order).tolist()))

    pipe.send([(task, (batch.map(taken_out, host=taken_out), failures)) for task, (batch, failures) in answer])
    for tensor in follow:
        pipe.send_bytes(_memory(tensor))


class _Follows(NamedTuple):
    """Stands for a tensor whose memory follows as it is: pickled tensors would take files, which are limited."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """As the dims lie in memory."""
    order: tuple[int, ...]
    """Their permutation."""


def _memory(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _received(worker: Worker) -> list[Part]:
    with worker.connected():
        answer = worker.pipe.recv()
        if isinstance(answer, UserError):
            raise answer

        def put_back(value: Any) -> Any:
            if not isinstance(value, _Follows):
                return value
            tensor = torch.empty(value.shape, dtype=value.dtype)
            worker.pipe.recv_bytes_into(_memory(tensor))
            return tensor.permute(value.order)

        return [(task, (batch.map(put_back, host=put_back), failures)) for task, (batch, failures) in answer]
