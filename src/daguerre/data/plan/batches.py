"""The samples of global batch n: a pure function of the seed and the indexes, the same on every rank.

The streams of the sources are mixed by weight into one endless stream of slots. Slots of one bucket make batches; a
batch is planned where its last slot comes. So the remainder of a bucket leads its next epoch, with its own epoch in its
key, and nothing is dropped. A position is a count of slots in planned batches. Nothing is read here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from daguerre import keys
from daguerre.data.plan.order import Order, SlotRange

BLOCK = 1024
"""Slots within which the sources' shares are exact, about."""
LARGEST_CHUNK = 64 * BLOCK
"""Most slots that are put into batches at a time; their number does not change the batches."""


class Slots(NamedTuple):
    """Slots of the mixed stream; every array is [n] int64."""

    members: np.ndarray
    """Indexes of the sources."""
    indexes: np.ndarray
    epochs: np.ndarray
    repeats: np.ndarray
    lanes: np.ndarray

    def at(self, chosen: np.ndarray | slice) -> Slots:
        return Slots(*(array[chosen] for array in self))


class Planned(NamedTuple):
    """A global batch."""

    bucket: int
    slots: Slots
    """[batch_size], slots of the same shards follow each other: ranks take equal shares of it."""

    def part(self, rank: int, ranks: int) -> Slots:
        """The share of one of several ranks; the parts in the ranks' order are the batch."""
        size = len(self.slots.indexes)
        return self.slots.at(slice(rank * size // ranks, (rank + 1) * size // ranks))


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The stream of all sources, and its batches."""

    seed: int
    orders: Sequence[Order]
    buckets: Sequence[np.ndarray | None]
    """For each source the bucket [M] int16 of each of its places; None: it is endless, and of the first bucket."""
    weights: Sequence[Fraction]
    """The sources' shares of the stream, in any scale."""
    num_buckets: int
    batch_size: int

    def batches(self, number: int) -> Iterator[Planned]:
        """Global batches from `number` on, without end."""
        chunk, ready = self._find(number)
        queues = self._remainders(chunk)
        while True:
            for bucket, queue, start in self._filled(queues, chunk):
                if ready >= number:
                    yield _batch(bucket, queue, start, self.batch_size)
                ready += 1
            chunk += 1

    @cached_property
    def _chunk(self) -> int:
        """Slots that are put into batches at a time, for a quick start: about a pass of small sources, and few of
        endless ones, which have no buckets to sort by."""
        indexes = sum(BLOCK if buckets is None else len(buckets) for buckets in self.buckets)
        return BLOCK * -(-min(LARGEST_CHUNK, max(indexes, 2 * self.batch_size)) // BLOCK)

    def _find(self, number: int) -> tuple[int, int]:
        """The chunk in which batch `number` gets its last slot, and the number of batches that are full before it."""
        chunk = number * self.batch_size // self._chunk  # never later: full batches take no fewer slots
        while self._full(chunk + 1) <= number:
            chunk += 1
        return chunk, self._full(chunk)

    def _full(self, chunk: int) -> int:
        """Batches that are full before a chunk."""
        return int((self._counts(chunk * self._chunk) // self.batch_size).sum())

    def _filled(self, queues: list[Slots], chunk: int) -> Iterator[tuple[int, Slots, int]]:
        """The batches that get their last slot in a chunk, in that order: bucket, queue and where the batch begins in
        it. `queues` moves on."""
        slots = self.slots(chunk * self._chunk, self._chunk)
        of = self._buckets_of(slots)
        done: list[tuple[int, tuple[int, Slots, int]]] = []
        for bucket in range(self.num_buckets):
            where = np.flatnonzero(of == bucket)
            if not len(where):
                continue
            waiting = len(queues[bucket].indexes)
            queue = _joined([queues[bucket], slots.at(where)])
            full = len(queue.indexes) // self.batch_size
            for i in range(full):
                last = where[(i + 1) * self.batch_size - 1 - waiting]
                done.append((int(last), (bucket, queue, i * self.batch_size)))
            queues[bucket] = queue.at(slice(full * self.batch_size, None))
        yield from (batch for _, batch in sorted(done, key=lambda each: each[0]))

    def _remainders(self, chunk: int) -> list[Slots]:
        """The slots that wait in each bucket before a chunk, found backwards, chunk by chunk."""
        missing = self._counts(chunk * self._chunk) % self.batch_size
        found: list[list[Slots]] = [[] for _ in range(self.num_buckets)]
        while missing.any():
            chunk -= 1
            if not (self._may_hold(chunk) & (missing > 0)).any():
                continue
            slots = self.slots(chunk * self._chunk, self._chunk)
            of = self._buckets_of(slots)
            for bucket in np.flatnonzero(missing).tolist():
                where = np.flatnonzero(of == bucket)[-int(missing[bucket]) :]
                found[bucket].insert(0, slots.at(where))
                missing[bucket] -= len(where)
        none = Slots(*(np.zeros(0, dtype=np.int64) for _ in Slots._fields))
        return [_joined([*parts, none]) for parts in found]

    def _may_hold(self, chunk: int) -> np.ndarray:
        """[number of buckets] bool: False if no slot of a chunk is of the bucket."""
        start, stop = self._positions(chunk * self._chunk), self._positions((chunk + 1) * self._chunk)
        parts = [o.may_hold(a, z - a) for o, a, z in zip(self.orders, start, stop, strict=True)]
        return np.logical_or.reduce(parts)

    def slots(self, position: int, n: int) -> Slots:
        """The `n` slots of the mixed stream from `position` on."""
        members = self._members(position, n)
        before = self._positions(position)
        columns = [np.zeros(n, dtype=np.int64) for _ in SlotRange._fields]
        first_lane = 0
        for member, order in enumerate(self.orders):
            where = np.flatnonzero(members == member)
            stretch = order.slots(before[member], len(where))
            for column, values in zip(columns, stretch._replace(lanes=stretch.lanes + first_lane), strict=True):
                column[where] = values
            first_lane += 1 << 20
        return Slots(members, *columns)

    def _members(self, position: int, n: int) -> np.ndarray:
        """[n]: the source of each slot."""
        if len(self.orders) == 1:
            return np.zeros(n, dtype=np.int64)
        first, last = position // self._block_size, -(-(position + n) // self._block_size)
        blocks = [self._block(number) for number in range(first, last)]
        return np.concatenate([*blocks, np.zeros(0, dtype=np.int64)])[position - first * self._block_size :][:n]

    @cached_property
    def _block(self) -> Callable[[int], np.ndarray]:
        """The sources of the slots of a block; the last four are cached."""
        return lru_cache(maxsize=4)(partial(_block, self))

    @cached_property
    def _block_size(self) -> int:
        """Slots of a block: whole shares if the weights have a small common measure, and at least one slot a source."""
        shares = [weight / sum(self.weights) for weight in self.weights]
        measure = math.lcm(*(share.denominator for share in shares))
        return BLOCK // measure * measure if measure <= BLOCK else BLOCK * math.ceil(1 / (BLOCK * min(shares)))

    def _shares(self, blocks: int) -> list[int]:
        """Slots of each source in the first `blocks` blocks."""
        edges = [int(edge * blocks * self._block_size) for edge in self._edges]
        return [after - before for before, after in pairwise(edges)]

    @cached_property
    def _edges(self) -> list[Fraction]:
        sums = [sum(self.weights[:i], Fraction(0)) for i in range(len(self.weights) + 1)]
        return [total / sums[-1] for total in sums]

    def _positions(self, position: int) -> list[int]:
        """Slots of each source before a position of the mixed stream."""
        if len(self.orders) == 1:
            return [position]
        block, rest = divmod(position, self._block_size)
        inside = np.bincount(self._block(block)[:rest], minlength=len(self.orders)).tolist() if rest else None
        before = self._shares(block)
        return before if inside is None else [a + b for a, b in zip(before, inside, strict=True)]

    def _counts(self, position: int) -> np.ndarray:
        """[number of buckets]: slots of each bucket before a position of the mixed stream."""
        if self.num_buckets == 1:
            return np.array([position], dtype=np.int64)
        before = self._positions(position)
        return np.sum([order.bucket_counts(p) for order, p in zip(self.orders, before, strict=True)], axis=0)

    def _buckets_of(self, slots: Slots) -> np.ndarray:
        """[n]: the bucket of each slot."""
        of = np.zeros(len(slots.indexes), dtype=np.int64)
        for member, buckets in enumerate(self.buckets):
            if buckets is not None:
                where = np.flatnonzero(slots.members == member)
                of[where] = buckets[slots.indexes[where]]
        return of


def _block(plan: BatchPlan, number: int) -> np.ndarray:
    """[block size]: the source of each slot of a block, in random order by the seed.

    The slots of a source are spread evenly, one drawn in each of as many equal ranges of the block. So if the weights
    have a common measure, such as 3:1 with 4, any as many consecutive slots have exactly the shares: a batch of 8
    always holds 6 and 2.
    """
    before, after = plan._shares(number), plan._shares(number + 1)
    counts = [stop - start for start, stop in zip(before, after, strict=True)]
    members = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    stretches = np.concatenate([np.arange(count) / count for count in counts])
    drawn = keys.uniforms(plan.seed, "mix", 0, number, count=len(members)) / np.repeat(counts, counts)
    return members[np.argsort(stretches + drawn, kind="stable")]


def _batch(bucket: int, queue: Slots, start: int, size: int) -> Planned:
    slots = queue.at(slice(start, start + size))
    return Planned(bucket, slots.at(np.argsort(slots.lanes, kind="stable")))


def _joined(parts: Sequence[Slots]) -> Slots:
    return Slots(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
