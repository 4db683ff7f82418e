"""Threads that stand for the processes of one run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from daguerre.ranks import Ranks, RanksGone

PATIENCE_SECONDS = 20.0


class Meeting:
    """What threads share: a barrier and a place for what they give."""

    def __init__(self, count: int, patience: float = PATIENCE_SECONDS) -> None:
        self.barrier, self.given, self.patience = threading.Barrier(count), [b""] * count, patience
        self.ranks = [Ranks(rank, count, self._gather(rank), self._broadcast(rank)) for rank in range(count)]

    def _exchange(self, rank: int, data: bytes) -> list[bytes]:
        try:
            self.given[rank] = data
            self.barrier.wait(self.patience)
            found = list(self.given)
            self.barrier.wait(self.patience)
        except threading.BrokenBarrierError:
            raise RanksGone("another rank does not respond: time-out") from None
        return found

    def _gather(self, rank: int) -> Callable[[bytes], list[bytes]]:
        return lambda data: self._exchange(rank, data) if rank == 0 else self._exchange(rank, data)[:0]

    def _broadcast(self, rank: int) -> Callable[[bytes], bytes]:
        return lambda data: self._exchange(rank, data)[0]


def together(count: int, action: Callable[[Ranks], Any], patience: float = PATIENCE_SECONDS) -> list[Any]:
    """What the action gives on each of so many ranks, an exception where it raised one."""

    def caught(ranks: Ranks) -> Any:
        try:
            return action(ranks)
        except Exception as error:  # noqa: BLE001 (handed to the test)
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(caught, Meeting(count, patience).ranks))


def all_fine(results: list[Any]) -> list[Any]:
    """The results; the first exception among them is raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
