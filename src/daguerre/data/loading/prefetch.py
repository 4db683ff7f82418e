"""Prefetches remote shards in plan order, on a background thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from daguerre.data.dataset import Dataset
from daguerre.data.plan import cache_window
from daguerre.data.plan.batches import BatchPlan
from daguerre.data.source import RemoteSource
from daguerre.errors import UserError


@contextmanager
def prefetching(
    dataset: Dataset, plan: BatchPlan, number: int, rank: int, ranks: int
) -> Iterator[Callable[[int], None]]:
    """Fetches the remote files that this rank's batches from `number` on need, in order, while the block runs.

    The function that it gives is to be called with the number of the batch in use, so that fetching goes on. Faults are
    left to the read that needs the file.
    """
    streams = dataset.remote_streams(plan.orders)
    if not streams:
        yield lambda number: None
        return
    lead = cache_window.lead_batches(streams, plan.batch_size)
    walk = _Walk(number, lead, int(dataset.settings.cache_gb * 1e9))
    thread = threading.Thread(
        target=walk.run, args=(_needs(dataset, plan, number, rank, ranks),), name="prefetching", daemon=True
    )
    thread.start()
    try:
        yield walk.reached
    finally:
        walk.stop()


def _needs(
    dataset: Dataset, plan: BatchPlan, number: int, rank: int, ranks: int
) -> Iterator[tuple[int, RemoteSource, int]]:
    """(batch, source, file) in the order of need, without end."""
    for planned in plan.batches(number):
        for source, file in dataset.remote_files_of(planned.part(rank, ranks)):
            yield number, source, file
        number += 1


class _Walk:
    """Fetches along the plan, at most `lead` batches and `limit_bytes` ahead of the batch in use."""

    def __init__(self, number: int, lead: int, limit_bytes: int) -> None:
        self._number, self._lead, self._limit_bytes = number, lead, limit_bytes
        self._stopped = False
        self._moved = threading.Condition()
        self._fetched: dict[tuple[int, int], tuple[int, int]] = {}
        """Last batch known to need it, and its bytes, by (id of the source, file)."""

    def reached(self, number: int) -> None:
        """Notes that batch `number` is in use."""
        with self._moved:
            self._number = number
            self._moved.notify()

    def stop(self) -> None:
        """Ends after the file that is being fetched."""
        with self._moved:
            self._stopped = True
            self._moved.notify()

    def run(self, needs: Iterator[tuple[int, RemoteSource, int]]) -> None:
        """Fetches one need after the other until it is stopped."""
        for number, source, file in needs:
            key = (id(source), file)
            with self._moved:
                while not self._stopped and not self._room(number):
                    self._moved.wait()
                if self._stopped:
                    return
            if key in self._fetched:
                self._fetched[key] = number, self._fetched[key][1]
                continue
            size = 0
            with suppress(OSError, UserError):
                size = source.prefetch(file)
            self._fetched[key] = number, size

    def _room(self, number: int) -> bool:
        """True if files of batch `number` may be fetched; forgets those that no batch from the one in use on needs."""
        if number <= self._number:
            return True
        self._fetched = {key: one for key, one in self._fetched.items() if one[0] >= self._number}
        in_use_bytes = sum(size for _, size in self._fetched.values())
        return number - self._number < self._lead and in_use_bytes < self._limit_bytes
