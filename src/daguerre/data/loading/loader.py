"""Batches in plan order: reading, decoding and captions in workers, random numbers drawn one batch ahead.

The same batches come whatever the number of ranks and workers and wherever a run begins. A sample that cannot be
decoded leaves its slot empty (valid 0) and is counted; a fault that may pass is tried again, then stops the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daguerre.data import captions, skipped
from daguerre.data.dataset import Dataset, Member
from daguerre.data.images.headers import Undecodable
from daguerre.data.loading.collate import Made, Rows, Task, retrying
from daguerre.data.loading.prefetch import prefetching
from daguerre.data.loading.workers import made_by, workers
from daguerre.data.plan.batches import Plan
from daguerre.data.plan.buckets import Bucket
from daguerre.data.settings import LoaderSettings
from daguerre.data.skipped import Failure, Look, Skips
from daguerre.errors import UserError
from daguerre.types import Batch

Draw = Callable[[Batch], Mapping[str, Tensor]]
Cut = Callable[[Sequence[str]], Mapping[int, str]]
EMPTY_LIMIT = 10_000
"""Slots in a row without a sample that can be decoded, after which a run stops."""


class Place(NamedTuple):
    """Where a micro-batch stands."""

    position: int
    """The slot of the plan that its first sample is."""
    last: bool
    """Whether it is the last one of its update."""


@dataclass(frozen=True)
class Loading:
    """The batches of one run on one rank, from any position of its plan."""

    dataset: Dataset
    loader: LoaderSettings
    seed: int
    batch_size: int
    """Samples of a global batch."""
    micro_batch_size: int
    """Most samples of a micro-batch."""
    draw: Draw
    """Random numbers of a batch, on the CPU; called one batch ahead of the loop."""
    cut: Cut
    """Which captions the family does not read whole."""
    skips: Skips = field(default_factory=Skips)
    rank: int = 0
    ranks: int = 1
    pinned: bool = False
    """Batches come in memory that a GPU reads by itself, so that nobody waits for their way there."""
    images: tuple[str, ...] = ()
    """Images that batches hold beside those that are trained on."""
    _unshared: list[Look] = field(default_factory=list, init=False, repr=False)
    """What this rank found and the others do not know yet."""

    @contextmanager
    def updates(self, position: int) -> Iterator[Iterator[list[Batch]]]:
        """The micro-batches of one update after the other from a count of slots on, made ahead, without end.

        Workers end with the block. UserError after an epoch (or `EMPTY_LIMIT` slots) in a row without one sample that
        can be decoded.
        """
        places: deque[Place] = deque()
        with ExitStack() as stack:
            thread = stack.enter_context(_thread())
            made = self._made(stack, self._noted(position, places))
            number = position // self.batch_size
            reached = stack.enter_context(prefetching(self.dataset, self.plan, number, self.rank, self.ranks))
            ready = _ahead(thread, lambda: self._ready(next(made)), self.loader.prefetch_batches)
            yield self._grouped(ready, places, reached)

    @cached_property
    def plan(self) -> Plan:
        """The plan of the run's batches. UserError for a batch that cannot be cut into equal shares of the ranks."""
        if self.batch_size % self.ranks:
            raise UserError(
                f"training.global_batch_size: {self.batch_size} samples cannot be shared by {self.ranks} ranks alike: "
                "choose a multiple"
            )
        self.dataset.refuse_without(self.images)
        return self.dataset.plan(self.seed, self.batch_size)

    def tasks(self, position: int) -> Iterator[tuple[Task, Place]]:
        """This rank's micro-batches from a position on, without end."""
        for number, planned in enumerate(self.plan.batches(position // self.batch_size), position // self.batch_size):
            bucket = self.dataset.buckets[planned.bucket]
            reads = self.dataset.reads(planned.part(self.rank, self.ranks))
            size = self.micro_size(bucket)
            count = len(reads.numbers)
            first = number * self.batch_size + self.rank * self.batch_size // self.ranks
            for start in range(0, count, size):
                yield Task(reads.part(start, start + size), bucket), Place(first + start, start + size >= count)

    @property
    def _rows(self) -> Rows:
        return Rows(self.dataset.members, self.seed, self.images)

    def micro_size(self, bucket: Bucket) -> int:
        """Most samples of a micro-batch of a bucket. UserError where not one has room in `loader.max_pixels`."""
        if self.loader.max_pixels is None:
            return self.micro_batch_size
        if self.loader.max_pixels < bucket.area_px:
            raise UserError(
                f"loader.max_pixels={self.loader.max_pixels} has no room for one picture of {bucket} "
                f"({bucket.area_px} pixels): raise it, or train on smaller pictures (data.resolution)"
            )
        return min(self.micro_batch_size, self.loader.max_pixels // bucket.area_px)

    def _noted(self, position: int, places: deque[Place]) -> Iterator[Task]:
        for task, place in self.tasks(position):
            places.append(place)
            yield task

    def _made(self, stack: ExitStack, tasks: Iterator[Task]) -> Iterator[Made]:
        rows = self._rows
        if not self.loader.num_workers:
            return map(rows.made, tasks)
        return made_by(stack.enter_context(workers(rows, self.loader.num_workers)), tasks, self.loader.prefetch_batches)

    def _ready(self, made: Made) -> Made:
        batch, failures = made
        batch = replace(batch, draws=self.draw(batch))
        return batch.map(Tensor.pin_memory) if self.pinned else batch, failures

    def _grouped(
        self, ready: Iterator[Made], places: deque[Place], reached: Callable[[int], None]
    ) -> Iterator[list[Batch]]:
        empty, limit = 0, min(EMPTY_LIMIT, self.dataset.count or EMPTY_LIMIT)
        update: list[Batch] = []
        for batch, failures in ready:
            place = places.popleft()
            cut = [
                Failure(i, batch.names[i], f"caption {how}", kept=True)
                for i, how in self.cut(batch.texts).items()
                if batch.valid_B[i]
            ]
            self._look(self.skips.seen(place.position, batch.keys, failures + cut))
            empty = 0 if batch.valid_B.any() else empty + len(batch.names)
            if empty >= limit:
                raise UserError(
                    f"none of the last {empty:,} samples could be decoded:\n{skipped.table(self.skips.reasons)}"
                )
            update.append(batch)
            if place.last:
                reached(place.position // self.batch_size)
                yield update
                update = []

    def _look(self, look: Look) -> None:
        """Counts what was found; with several ranks when all of them share it."""
        if self.ranks == 1:
            self.skips.take(look, self.dataset.size)
        else:
            self._unshared.append(look)

    def share(self, gather: Callable[[Any], list[Any]]) -> None:
        """With several ranks: counts on each what all have found since the last call. UserError as `Skips.take`.

        `gather` gives the JSON documents of all ranks, in their order; all ranks call this at the same time.
        """
        if self.ranks == 1:
            return
        mine = [*self._unshared]
        self._unshared.clear()
        for look in sorted((Look(*each) for its in gather(mine) for each in its), key=lambda look: look.position):
            self.skips.take(look, self.dataset.size)

    def first(self, position: int) -> Batch:
        """The micro-batch at a position, with its draws, made here and now; nothing is counted."""
        task, _ = next(self.tasks(position))
        return self._ready(self._rows.made(task))[0]

    def report(self) -> dict[str, Any]:
        """What the source is and what was left out, for data.json."""
        found = skipped.merged(
            self.dataset.report(), self.dataset.notes(self.batch_size, self.images), self.skips.reasons
        )
        return {"source": self.dataset.settings.kinds, "count": self.dataset.size, "skipped": found}

    def document(self) -> dict[str, Any]:
        """What a checkpoint holds of it; the position is the training state's."""
        return {"samples": self.dataset.fingerprint, "skips": self.skips.document()}

    def restore(self, document: Mapping[str, Any], may_differ: bool = False) -> None:
        """Takes over what `document` gave. UserError where the source no longer holds the same samples, unless that was
        allowed."""
        if document["samples"] != self.dataset.fingerprint and not may_differ:
            raise UserError(
                "the samples are not those that this run was trained on: files were added, removed, renamed, damaged "
                f"or mended (now {self.dataset.size} samples). Put them back to go on exactly; or start a new run from "
                "these weights with init_from=RUN run_name=NEW"
            )
        self.skips.restore(document["skips"])


def fixed_batches(
    dataset: Dataset,
    num_samples: int,
    size_of: Callable[[Bucket], int],
    rank: int = 0,
    ranks: int = 1,
    images: tuple[str, ...] = (),
) -> Iterator[Batch]:
    """The first samples of a data set in its own order, captions kept, centre crops, no flips: for validation.

    `size_of` gives the most samples of a batch of a bucket. Each rank gets its batches, all as many: where there are
    not enough, the last one once more without a valid sample.
    """
    rows, tasks = Rows(_without_chance(dataset), 0, images), []
    for number, reads in dataset.first(num_samples):
        bucket, count = dataset.buckets[number], len(reads.numbers)
        size = min(size_of(bucket), -(-count // ranks))
        tasks += [Task(reads.part(start, start + size), bucket) for start in range(0, count, size)]
    for index in range(rank, -(-len(tasks) // ranks) * ranks, ranks):
        batch = rows.made(tasks[min(index, len(tasks) - 1)])[0]
        yield batch if index < len(tasks) else replace(batch, valid_B=torch.zeros_like(batch.valid_B))


def fixed_captions(dataset: Dataset, num_samples: int) -> list[str]:
    """The captions of the same samples; no picture is decoded."""
    members, found = _without_chance(dataset), []
    for _, reads in dataset.first(num_samples):
        for member, number, key in zip(reads.members.tolist(), reads.numbers.tolist(), reads.keys, strict=True):
            settings, source, _ = members[member]
            with suppress(Undecodable):
                found.append(captions.choose(retrying(source.record, number), settings, 0, key))
    return found[:num_samples]


def _without_chance(dataset: Dataset) -> tuple[Member, ...]:
    plain = {"caption_dropout": 0.0, "random_flip": False, "crop": "center"}
    return tuple(m._replace(settings=m.settings.model_copy(update=plain)) for m in dataset.members)


@contextmanager
def _thread() -> Iterator[ThreadPoolExecutor]:
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
    try:
        yield thread
    finally:
        thread.shutdown(cancel_futures=True)


def _ahead(thread: ThreadPoolExecutor, make: Callable[[], Made], size: int) -> Iterator[Made]:
    """Values of `make` in order, `size` of them ready or in the making; an error comes where its value would have."""
    ready = deque(thread.submit(make) for _ in range(size))
    while True:
        made = ready.popleft().result()
        ready.append(thread.submit(make))
        yield made
