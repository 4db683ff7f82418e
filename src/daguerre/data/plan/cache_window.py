"""Checks that the cache can hold the remote shards that a run reads concurrently and prefetches.

The cache drops the least recently used file, so each is fetched once if it holds all files that are used between two
uses of one. The prefetch is half a window, and the window is one segment: two segments at most are in use at any time,
three where a pass ends. Nothing is read or fetched here.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from daguerre.data.plan.order import EpochOrder
from daguerre.data.source import Files
from daguerre.errors import UserError

PASSES = 2
"""EpochOrder that are examined; each has another order of shards, which changes little."""


class Stream(NamedTuple):
    """A remote source in a plan."""

    order: EpochOrder
    files: Files
    share: Fraction
    """Of the plan's slots."""


def lead_batches(streams: Sequence[Stream], batch_size: int) -> int:
    """Batches that remote files are prefetched ahead of the batch in use."""
    return _window_slots(streams, batch_size) // (2 * batch_size)


def check_cache_size(streams: Sequence[Stream], batch_size: int, cache_gb: float, where: str) -> None:
    """UserError if a cache of `cache_gb` is too small, so that whole files would be fetched again and again.

    `where` is the prefix of the names of a source's settings.
    """
    limit_bytes = int(cache_gb * 1e9)
    needed = needed_bytes(streams, batch_size)
    if needed <= limit_bytes:
        return
    fits = {name: _fitting(streams, name, batch_size, limit_bytes) for name in ("lane_samples", "lanes")}
    lower = [f"{where}{name} ({number} fits)" for name, number in fits.items() if number]
    digit = 10 ** max(0, len(str(needed)) - 3)
    needed_gb = f"{-(-needed // digit) * digit / 1e9:.3g}"  # rounded up
    raise UserError(
        f"data.cache_gb: remote files of {needed_gb} GB are read concurrently and prefetched in this order "
        f"({where}lanes, {where}lane_samples), more than the {limit_bytes / 1e9:.3g} GB that may be kept on the local "
        f"disk: whole files would be fetched again and again. Raise data.cache_gb to {needed_gb}"
        f"{' or lower ' * bool(lower)}{' or '.join(lower)}",
        code="resources",
        setting="data.cache_gb",
    )


def needed_bytes(streams: Sequence[Stream], batch_size: int) -> int:
    """Most bytes of the different files in use at a time, of all sources and all ranks together."""
    window = _window_slots(streams, batch_size)
    return sum(_needed_bytes(stream, math.ceil(window * stream.share)) for stream in streams)


def _window_slots(streams: Sequence[Stream], batch_size: int) -> int:
    """Slots of the plan between those in use and twice the prefetch."""
    segments = [_segment_slots(stream.order) / stream.share for stream in streams]
    return max(4 * batch_size, int(min(segments)))


def _segment_slots(order: EpochOrder) -> int:
    return (order.lanes if order.shuffle else 1) * order.lane_samples


def _needed_bytes(stream: Stream, window: int) -> int:
    """Most bytes of the different files that `window` consecutive slots of a source are in, in whole segments."""
    order, files = stream.order, stream.files
    chosen = np.diff(order.shard_starts) > 0
    every = int(files.sizes_bytes[np.unique(files.of_shards[chosen])].sum())
    shard_bytes = np.where(chosen, files.sizes_bytes[files.of_shards], 0)
    count = -(-(window - 1) // _segment_slots(order)) + 1
    number = len(order.segment_starts) - 1
    if not every or count >= number:
        return every
    passes = [_by_segment(order, shard_bytes, one, count) for one in range(PASSES)]
    largest = max(int(bytes_by_count[count].max()) for bytes_by_count in passes)
    for before, after in pairwise(passes):
        for tail in range(1, count + 1):  # the last segment of a pass may be a short one
            head = min(count - 1, count + 1 - tail)
            largest = max(largest, int(before[tail][number - tail] + after[head][0]))
    return min(largest, every)


def _by_segment(order: EpochOrder, shard_bytes: np.ndarray, number: int, longest: int) -> list[np.ndarray]:
    """Bytes of the shards of 0 to `longest` consecutive segments of pass `number`: [K] int64 each, by the first one."""
    shards, starts = order.row(number)
    size = shard_bytes[shards]
    before = np.concatenate([[0], np.cumsum(size)])
    steps = np.arange(len(order.segment_starts) - 1, dtype=np.int64)[:, None] * order.lane_samples
    begins, ends = order.lane_starts[:-1] + steps, order.lane_starts[1:]
    first = np.searchsorted(starts, begins, side="right") - 1
    found = [np.zeros(len(steps), dtype=np.int64)]
    for count in range(1, longest + 1):
        stops = np.minimum(begins + count * order.lane_samples, ends)
        last = np.searchsorted(starts, stops - 1, side="right") - 1
        there = stops > begins
        whole = np.where(there, before[last + 1] - before[np.minimum(first, len(size))], 0).sum(axis=1)
        again = there[:, :-1] & there[:, 1:] & (last[:, :-1] == first[:, 1:])  # one shard in two lanes
        found.append(whole - np.where(again, size[last[:, :-1]], 0).sum(axis=1))
    return found


def _fitting(streams: Sequence[Stream], name: str, batch_size: int, limit_bytes: int) -> int:
    """A lower `lanes` or `lane_samples` for which the cache is large enough; 0 if lowering it (to segments of few
    batches) does not help."""
    value = max(getattr(stream.order, name) for stream in streams) * 3 // 4
    while value:
        lower = []
        for stream in streams:
            order = replace(stream.order, **{name: min(value, getattr(stream.order, name))})
            lower.append(stream._replace(order=order))
        if needed_bytes(lower, batch_size) <= limit_bytes:
            return value
        if min(_segment_slots(stream.order) for stream in lower) < 4 * batch_size:
            break
        value = value * 3 // 4
    return 0
