"""Far shards are brought near before their samples are asked for: a thread that walks the plan ahead of the trainer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from daguerre.data.dataset import Dataset
from daguerre.data.plan import Plan
from daguerre.data.source import FarSource

SHARE_OF_CACHE = 0.5
"""How much of the cache may hold what is not needed yet; the rest is for what is being read."""


@contextmanager
def prefetching(dataset: Dataset, plan: Plan, number: int, rank: int, ranks: int) -> Iterator[Callable[[int], None]]:
    """Fetches the shards that this rank's batches from `number` on need, in the order of their need, while the block
    runs.

    What it gives is to be called with the number of the batch that is in use, and lets it go on. A fault is left for
    the read that needs the shard, which says so.
    """
    if not any(member.far for member in dataset.members):
        yield lambda number: None
        return
    settings = dataset.settings
    lead = max(2, settings.lanes * settings.lane_samples // plan.batch_size)
    walk = _Walk(number, lead, int(settings.cache_gb * 1e9 * SHARE_OF_CACHE))
    thread = threading.Thread(
        target=walk.run, args=(_needs(dataset, plan, number, rank, ranks),), name="prefetching", daemon=True
    )
    thread.start()
    try:
        yield walk.reached
    finally:
        walk.stop()


def _needs(dataset: Dataset, plan: Plan, number: int, rank: int, ranks: int) -> Iterator[tuple[int, FarSource, int]]:
    """(batch, source, shard): what is needed when, without end."""
    for planned in plan.batches(number):
        for source, shard in dataset.far_shards_of(planned.part(rank, ranks)):
            yield number, source, shard
        number += 1


class _Walk:
    """How far the plan is fetched: at most `lead` batches and `limit_bytes` ahead of the batch in use."""

    def __init__(self, number: int, lead: int, limit_bytes: int) -> None:
        self._number, self._lead, self._limit_bytes = number, lead, limit_bytes
        self._stopped = False
        self._moved = threading.Condition()
        self._fetched: deque[tuple[int, int]] = deque()

    def reached(self, number: int) -> None:
        """Batch `number` is in use."""
        with self._moved:
            self._number = number
            self._moved.notify()

    def stop(self) -> None:
        """Ends the walk after the shard that is being fetched."""
        with self._moved:
            self._stopped = True
            self._moved.notify()

    def run(self, needs: Iterator[tuple[int, FarSource, int]]) -> None:
        """Fetches one need after the other until it is stopped."""
        for number, source, shard in needs:
            with self._moved:
                while not self._stopped and not self._room(number):
                    self._moved.wait()
                if self._stopped:
                    return
            with suppress(OSError):
                self._fetched.append((number, source.prefetch(shard)))

    def _room(self, number: int) -> bool:
        while self._fetched and self._fetched[0][0] < self._number:
            self._fetched.popleft()
        ahead_bytes = sum(size for _, size in self._fetched)
        return number <= self._number or (number - self._number < self._lead and ahead_bytes < self._limit_bytes)
