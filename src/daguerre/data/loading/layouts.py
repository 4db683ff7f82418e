"""Micro-batches of one layout: networks take pictures of one size at a time, and samples have reference images of many.

The plan knows nothing of it: an update has the samples that it would have anyway. A bucket of the plan for each layout
would hold one sample where sizes are free, and fill a batch with that one again and again.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from daguerre.data.images.headers import Undecodable
from daguerre.data.loading.collate import Collated, Collator, Layout, Task, unpadded
from daguerre.types import Batch

Part = tuple[Task, Collated]
"""A micro-batch, with the task of its samples."""


def parts(collator: Collator, task: Task) -> list[Part]:
    """The micro-batches of a task: itself, or several of samples that have as many reference images of the same sizes,
    in the order of the first of them. A sample that cannot be used is an empty slot of the first one."""
    if not task.largest:
        return [(task, collator.collate(task))]
    records = [collator.record(task, row) for row in range(len(task.reads.numbers))]
    rows: dict[Layout, list[int]] = {}
    unusable = []
    for row, record in enumerate(records):
        try:
            if isinstance(record, Undecodable):
                raise record
            rows.setdefault(collator.layout(task, row, record), []).append(row)
        except Undecodable:
            unusable.append(row)
    first = next(iter(rows), ())
    rows[first] = sorted([*rows.get(first, []), *unusable])
    return [
        (task.at(some), collator.collate(task.at(some), [records[row] for row in some]))
        for layout, of in rows.items()
        for some in _cut(of, _largest(task, layout))
    ]


def _largest(task: Task, layout: Layout) -> int:
    """Most samples of a micro-batch of this layout; one in any case."""
    if task.max_pixels is None:
        return task.largest
    area_px = task.bucket.area_px + sum(height * width for height, width in layout)
    return max(1, min(task.largest, task.max_pixels // area_px))


def _cut(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def by_key(part: Part, key: Callable[[Batch], Sequence[Hashable]]) -> list[Part]:
    """The micro-batch split into those of equal keys: what a family knows of rows that its net takes together, such as
    the length of their captions."""
    task, (batch, failures) = part
    rows: dict[Hashable, list[int]] = {}
    for row, own in enumerate(key(batch)):
        rows.setdefault(own, []).append(row)
    if len(rows) < 2:
        return [part]
    parts = [(of, batch.at(of)) for of in rows.values()]
    return [
        (
            task.at(of),
            (
                replace(own, features=unpadded(own.features)),
                [f._replace(row=of.index(f.row)) for f in failures if f.row in of],
            ),
        )
        for of, own in parts
    ]


def as_many(update: list[Batch], count: int) -> list[Batch]:
    """The micro-batches of an update, the largest ones halved until there are `count`: every rank of a sharded network
    has to run as many, and each has samples enough for it."""
    while len(update) < count:
        longest = max(range(len(update)), key=lambda number: len(update[number].names))
        batch = update[longest]
        half = len(batch.names) // 2
        assert half, "ranks have equal shares of an update"
        update = [*update[:longest], batch.rows(0, half), batch.rows(half, len(batch.names)), *update[longest + 1 :]]
    return update
