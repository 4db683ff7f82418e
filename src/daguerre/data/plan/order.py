"""The order in which one source is trained on: an endless stream of places, a pure function of the seed.

A pass visits each place (a chosen sample) once. Its order keeps reading local: the shards are permuted and laid out in
a row, the row is split into `lanes` equal ranges that are walked concurrently, and each step of `lane_samples` on every
lane is a *segment*. A set of one segment is shuffled completely. In larger sets each lane is shuffled within the
segment, and the lanes take turns: of any `lanes` consecutive slots each lane has one, so that ranks that take equal
shares of a batch can keep to lanes of their own. Nothing here knows of files, batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import NamedTuple, Protocol

import numpy as np

from daguerre import keys


class SlotRange(NamedTuple):
    """Consecutive slots of a stream; every array is [n] int64."""

    indexes: np.ndarray
    """Indexes into the source's chosen samples."""
    epochs: np.ndarray
    repeats: np.ndarray
    lanes: np.ndarray
    """Neighbouring slots of one lane are read from the same shard."""

    def part(self, start: int, stop: int) -> SlotRange:
        """Slots `start` to `stop` of these."""
        return SlotRange(*(array[start:stop] for array in self))


class Order(Protocol):
    """The stream of one source."""

    def slots(self, position: int, n: int) -> SlotRange:
        """The `n` slots from `position` on."""

    def bucket_counts(self, position: int) -> np.ndarray:
        """[number of buckets] int64: the slots before `position`, by bucket."""

    def may_hold(self, position: int, n: int) -> np.ndarray:
        """[number of buckets] bool: False if none of the `n` slots from `position` on is of the bucket. Quick, so True
        too often rather than too rarely."""


@dataclass(frozen=True)
class InfiniteOrder:
    """0, 1, 2 and so on, for an endless source; all of one bucket."""

    num_buckets: int = 1

    def slots(self, position: int, n: int) -> SlotRange:
        """The `n` slots from `position` on."""
        zeros = np.zeros(n, dtype=np.int64)
        return SlotRange(np.arange(position, position + n, dtype=np.int64), zeros, zeros, zeros)

    def bucket_counts(self, position: int) -> np.ndarray:
        """All slots are of the first bucket."""
        return np.array([position, *[0] * (self.num_buckets - 1)], dtype=np.int64)

    def may_hold(self, position: int, n: int) -> np.ndarray:
        """All slots are of the first bucket."""
        return np.arange(self.num_buckets) < min(n, 1)


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """Pass after pass over M places that stand in S shards, `repeats` passes an epoch."""

    seed: int
    shard_starts: np.ndarray
    """[S + 1] int64: the first place of each shard, and M."""
    buckets: np.ndarray
    """[M] int16: the bucket of each place."""
    num_buckets: int
    repeats: int
    shuffle: bool
    lanes: int
    lane_samples: int
    by_shard: np.ndarray | None = None
    """[S, number of buckets]: the places of each shard by bucket, so that a large set need not be read to count them.
    None: they are counted when that is asked."""

    @property
    def count(self) -> int:
        """M: places of a pass."""
        return len(self.buckets)

    def slots(self, position: int, n: int) -> SlotRange:
        """The `n` slots from `position` on."""
        found, wanted = [], n
        while wanted:
            number, start = divmod(position, self.count)
            segment = self._segment_of(start)
            first, stop = self.segment_starts[segment : segment + 2].tolist()
            part = self._segment(number, segment).part(start - first, min(stop, start + wanted) - first)
            found.append(part)
            position, wanted = position + len(part.indexes), wanted - len(part.indexes)
        if not found:
            return SlotRange(*(np.zeros(0, dtype=np.int64) for _ in SlotRange._fields))
        return SlotRange(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))

    def bucket_counts(self, position: int) -> np.ndarray:
        """[number of buckets] int64: the slots before `position`, by bucket."""
        number, start = divmod(position, self.count)
        segment = self._segment_of(start)
        counts = number * self._totals + self._before(number, segment)
        left = start - int(self.segment_starts[segment])
        if left:
            indexes = self._segment(number, segment).indexes[:left]
            counts = counts + np.bincount(self.buckets[indexes], minlength=self.num_buckets)
        return counts

    def may_hold(self, position: int, n: int) -> np.ndarray:
        """[number of buckets] bool: the buckets of the segments that the slots touch; nothing is shuffled."""
        found = np.zeros(self.num_buckets, dtype=bool)
        while n > 0:
            number, start = divmod(position, self.count)
            stop = min(start + n, self.count)
            found |= _counts(self, number, self._segment_of(start), self._segment_of(stop - 1) + 1) > 0
            position, n = position + stop - start, n - (stop - start)
        return found

    def _segment_of(self, start: int) -> int:
        return int(np.searchsorted(self.segment_starts, start, side="right")) - 1

    @cached_property
    def _layout(self) -> Callable[[int], _Layout]:
        """The row of shards of a pass; the last four are cached."""
        return lru_cache(maxsize=4)(partial(_layout, self))

    @cached_property
    def _segment(self) -> Callable[[int, int], SlotRange]:
        """The slots of a segment of a pass; the last four are cached."""
        return lru_cache(maxsize=4)(partial(_segment, self))

    @cached_property
    def lane_starts(self) -> np.ndarray:
        """[lanes + 1] int64: starts of the lanes in the row of shards, and M. One lane if nothing is shuffled."""
        number = min(self.lanes, self.count) if self.shuffle else 1
        return np.arange(number + 1, dtype=np.int64) * self.count // number

    @cached_property
    def segment_starts(self) -> np.ndarray:
        """[K + 1] int64: starts of the segments in a pass, and M; the same in every pass."""
        lengths = np.diff(self.lane_starts)
        steps = np.arange(-(-int(lengths.max()) // self.lane_samples), dtype=np.int64)[:, None] * self.lane_samples
        sizes = (lengths[None, :] - steps).clip(0, self.lane_samples).sum(axis=1)
        return np.concatenate([[0], np.cumsum(sizes)])

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The shards [S] int64 of pass `number` in their order, and their starts in the row [S + 1] int64."""
        lengths = np.diff(self.shard_starts)
        shards = np.arange(len(lengths), dtype=np.int64)
        if self.shuffle:
            shards = keys.permutation(self.seed, "shards", number, len(lengths))
        return shards, np.concatenate([[0], np.cumsum(lengths[shards])])

    @cached_property
    def _before(self) -> Callable[[int, int], np.ndarray]:
        """The slots of each bucket before a segment of a pass; the last four are cached."""
        return lru_cache(maxsize=4)(lambda number, segment: _counts(self, number, 0, segment))

    @cached_property
    def _totals(self) -> np.ndarray:
        if self.by_shard is not None:
            return self.by_shard.sum(axis=0, dtype=np.int64)
        return np.bincount(self.buckets, minlength=self.num_buckets)


class _Layout(NamedTuple):
    """The row of shards of one pass."""

    shards: np.ndarray
    """[S] int64: the shards in their order."""
    starts: np.ndarray
    """[S + 1] int64: start of each shard in the row, and M."""


def _layout(order: EpochOrder, number: int) -> _Layout:
    return _Layout(*order.row(number))


def _counts(order: EpochOrder, number: int, first: int, last: int) -> np.ndarray:
    """[number of buckets] int64: the slots of the segments `first` to `last` of a pass, by bucket."""
    counts = np.zeros(order.num_buckets, dtype=np.int64)
    if order.num_buckets == 1:
        return counts + order.segment_starts[last] - order.segment_starts[first]
    layout, rows = order._layout(number), [np.zeros(0, dtype=np.int64)]
    edges = order.lane_starts[:-1, None] + np.array([first, last]) * order.lane_samples
    edges = np.minimum(edges, order.lane_starts[1:, None])
    for start, stop in edges[edges[:, 0] < edges[:, 1]].tolist():
        head, tail = stop, stop
        if order.by_shard is not None:
            here, there = np.searchsorted(layout.starts, [start, stop - 1], side="right") - 1
            if here < there:
                head, tail = layout.starts[[here + 1, there]].tolist()
                counts += order.by_shard[layout.shards[here + 1 : there]].sum(axis=0, dtype=np.int64)
        rows += [np.arange(start, head), np.arange(tail, stop)]
    held = order.buckets[_places(order, layout, np.concatenate(rows))]
    return counts + np.bincount(held, minlength=order.num_buckets)


def _places(order: EpochOrder, layout: _Layout, row: np.ndarray) -> np.ndarray:
    """The chosen samples that stand at these places of the row of shards."""
    which = np.searchsorted(layout.starts, row, side="right") - 1
    return row - layout.starts[which] + order.shard_starts[layout.shards[which]]


def _segment(order: EpochOrder, number: int, segment: int) -> SlotRange:
    """The slots of one segment of pass `number`."""
    layout = order._layout(number)
    begins = order.lane_starts[:-1] + segment * order.lane_samples
    ends = np.minimum(begins + order.lane_samples, order.lane_starts[1:])
    sizes = (ends - begins).clip(0)
    lanes = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
    offsets = np.arange(len(lanes), dtype=np.int64) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    row = begins[lanes] + offsets
    if order.shuffle:
        words = keys.words(order.seed, "shuffle", segment, number, count=len(row))
        whole = len(order.segment_starts) == 2
        shuffled = np.argsort(words, kind="stable") if whole else _in_turns(lanes, sizes, words)
        row, lanes = row[shuffled], lanes[shuffled]
    indexes = _places(order, layout, row)
    epoch, repeat = divmod(number, order.repeats)
    return SlotRange(indexes, np.full_like(indexes, epoch), np.full_like(indexes, repeat), lanes)


def _in_turns(lanes: np.ndarray, sizes: np.ndarray, words: np.ndarray) -> np.ndarray:
    """An order [n] of places that are sorted by lane (`sizes` of each): each lane by its words; in turn r the r-th
    place of every lane, and these by the lower halves of their words, which say nothing of the order within lanes."""
    by_lane = np.lexsort((words, lanes))
    turns = np.empty(len(lanes), dtype=np.int64)
    turns[by_lane] = np.arange(len(lanes)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.lexsort((words << np.uint64(32), turns))
