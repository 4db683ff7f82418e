"""Batches in plan order: read, decoded and captioned in workers, their draws and tokens made one batch ahead.

The batches are the same for any number of ranks and workers and wherever a run begins. A sample that cannot be decoded
leaves its slot empty (valid 0) and is counted; a fault that may pass is retried, then stops the run.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from daguerre.conditions.condition import NO_IMAGES, Images, references
from daguerre.data import captions, skipped
from daguerre.data.cached.rows import LOST
from daguerre.data.dataset import Dataset, Member
from daguerre.data.images.headers import Undecodable
from daguerre.data.loading import layouts
from daguerre.data.loading.collate import Collated, Collator, Task, retrying
from daguerre.data.loading.layouts import Part
from daguerre.data.loading.prefetch import prefetching
from daguerre.data.loading.workers import made_by, workers
from daguerre.data.plan.batches import BatchPlan
from daguerre.data.plan.buckets import Bucket
from daguerre.data.settings import NAMELESS, LoaderSettings
from daguerre.data.skipped import Failure, SkipEvent, Skips
from daguerre.errors import UserError
from daguerre.types import Batch, Record

Draw = Callable[[Batch], Mapping[str, Tensor]]
Cut = Callable[[Sequence[str]], Mapping[int, str]]
LayoutOf = Callable[[Batch], Sequence[Hashable]]
EMPTY_LIMIT = 10_000
"""Slots in a row without a sample that can be decoded, after which a run stops."""
_COUNTED = 2_000
"""Most samples whose captions are read to count their tags."""


class _Location(NamedTuple):
    """A micro-batch's place in the plan."""

    position: int
    """The slot of its first sample."""
    last: bool
    """True for the last one of its update."""


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
    """Random numbers and tokens of a batch, on the CPU; called one batch ahead of the loop, in a thread."""
    cut: Cut
    """Captions that the family truncates, by row, with the reason."""
    skips: Skips = field(default_factory=Skips)
    rank: int = 0
    ranks: int = 1
    pinned: bool = False
    """Batches come in pinned memory."""
    images: Images = field(default_factory=dict)
    """Further images that batches hold with those that are trained on; None: the sources store them."""
    columns: tuple[str, ...] = ()
    """Numbers of the metadata that batches hold."""
    layout: LayoutOf | None = None
    """What a family knows of the rows of a batch with its draws: those of equal layouts can be computed together. None:
    any can."""
    agreed: Callable[[int], int] = field(default=lambda count: count, repr=False)
    """The largest of the counts of all ranks, which call this at the same time; used where updates differ in the number
    of their micro-batches."""
    captions: list[dict[str, Any]] = field(default_factory=list)
    """Digests of the captions that were trained on, each with the update `from_step` from which it holds."""
    _unshared: list[SkipEvent] = field(default_factory=list, init=False, repr=False)
    """Findings of this rank that the others do not know yet."""

    @contextmanager
    def updates(self, position: int) -> Iterator[Iterator[list[Batch]]]:
        """The micro-batches of one update after the other from a count of slots on, prefetched, without end.

        Workers end with the block. UserError after an epoch (or `EMPTY_LIMIT` slots) in a row without one sample that
        can be decoded.
        """
        locations: deque[tuple[Task, _Location]] = deque()
        with ExitStack() as stack:
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
            stack.callback(thread.shutdown, cancel_futures=True)
            collated = self._collated(stack, self._noted(position, locations))
            number = position // self.batch_size
            reached = stack.enter_context(prefetching(self.dataset, self.plan, number, self.rank, self.ranks))
            ready = _prefetched(thread, lambda: self._ready(next(collated)), self.loader.prefetch_batches)
            yield self._grouped(ready, locations, reached)

    @property
    def is_ragged(self) -> bool:
        """True where not all samples of a bucket can be computed together."""
        return self.layout is not None or references(self.images) is not None

    @cached_property
    def plan(self) -> BatchPlan:
        """The plan of the run's batches. UserError if the ranks cannot have equal shares of a batch."""
        if self.batch_size % self.ranks:
            raise UserError(
                f"training.global_batch_size: {self.batch_size} samples cannot be shared equally by "
                f"{self.ranks} ranks: choose a multiple",
                setting="training.global_batch_size",
            )
        self.dataset.check_present(self.images)
        return self.dataset.plan(self.seed, self.batch_size)

    def tasks(self, position: int) -> Iterator[tuple[Task, _Location]]:
        """This rank's micro-batches from a position on, without end; of ragged ones, its share of each update."""
        for number, planned in enumerate(self.plan.batches(position // self.batch_size), position // self.batch_size):
            bucket = self.dataset.buckets[planned.bucket]
            reads = self.dataset.reads(planned.part(self.rank, self.ranks))
            size = self.micro_size(bucket)
            count = len(reads.numbers)
            first = number * self.batch_size + self.rank * self.batch_size // self.ranks
            if self.is_ragged:
                yield Task(reads, bucket, size, self.loader.max_pixels), _Location(first, True)
                continue
            for start in range(0, count, size):
                yield Task(reads.part(start, start + size), bucket), _Location(first + start, start + size >= count)

    @property
    def _collator(self) -> Collator:
        return Collator(self.dataset.members, self.seed, self.images, self.columns)

    def micro_size(self, bucket: Bucket) -> int:
        """Most samples of a micro-batch of a bucket. UserError if `loader.max_pixels` holds not even one."""
        if self.loader.max_pixels is None:
            return self.micro_batch_size
        if self.loader.max_pixels < bucket.area_px:
            raise UserError(
                f"loader.max_pixels={self.loader.max_pixels} is less than one image of {bucket} ({bucket.area_px} "
                "pixels): raise it, or train on smaller images (data.resolution)",
                setting="loader.max_pixels",
            )
        return min(self.micro_batch_size, self.loader.max_pixels // bucket.area_px)

    def _noted(self, position: int, locations: deque[tuple[Task, _Location]]) -> Iterator[Task]:
        for asked in self.tasks(position):
            locations.append(asked)
            yield asked[0]

    def _collated(self, stack: ExitStack, tasks: Iterator[Task]) -> Iterator[list[Part]]:
        if not self.loader.num_workers:
            return map(partial(layouts.parts, self._collator), tasks)
        pool = stack.enter_context(workers(self._collator, self.loader.num_workers))
        return made_by(pool, tasks, self.loader.prefetch_batches)

    def _ready(self, parts: list[Part]) -> list[Part]:
        found = []
        for task, (batch, failures) in parts:
            drawn = task, (replace(batch, draws=self.draw(batch)), failures)
            own = [drawn] if self.layout is None else layouts.by_key(drawn, self.layout)
            # Of fewer rows the draws are the same, and tokens have no padding whose mask would be waited for.
            found += own if len(own) == 1 else [(t, (replace(b, draws=self.draw(b)), f)) for t, (b, f) in own]
        if self.pinned:
            found = [(task, (pinned(batch), failures)) for task, (batch, failures) in found]
        return found

    def _grouped(
        self, ready: Iterator[list[Part]], locations: deque[tuple[Task, _Location]], reached: Callable[[int], None]
    ) -> Iterator[list[Batch]]:
        empty, limit = 0, min(EMPTY_LIMIT, self.dataset.count or EMPTY_LIMIT)
        update: list[Batch] = []
        for parts in ready:
            _, location = locations.popleft()
            position = location.position
            for batch, failures in self._mended(parts):
                self._note(position, batch, failures)
                position += len(batch.names)
                empty = 0 if batch.valid_B.any() else empty + len(batch.names)
                if empty >= limit:
                    what = f"none of the last {empty:,} samples could be decoded:\n{skipped.table(self.skips.reasons)}"
                    raise UserError(what, code="empty")
                update.append(batch)
            if location.last:
                reached(location.position // self.batch_size)
                yield layouts.as_many(update, self.agreed(len(update))) if self.is_ragged else update
                update = []

    def _mended(self, parts: list[Part]) -> Iterator[Collated]:
        """The micro-batches, once cached rows that they lack are encoded again: here, as this thread alone uses the
        encoders."""
        for task, (batch, failures) in parts:
            if any(failure.reason == LOST for failure in failures):
                whole = self._collator.mended(task, (batch, failures))
                yield from (collated for _, collated in self._ready([(task, whole)]))
            else:
                yield batch, failures

    def _note(self, position: int, batch: Batch, failures: list[Failure]) -> None:
        """Counts what was found in a micro-batch whose first slot is `position`."""
        cut = [
            Failure(i, batch.names[i], f"caption {how}", kept=True)
            for i, how in self.cut(batch.texts).items()
            if batch.valid_B[i]
        ]
        look = self.skips.seen(position, batch.keys, failures + cut)
        if self.ranks == 1:
            self.skips.take(look, self.dataset.size)
        else:  # counted when all ranks share theirs
            self._unshared.append(look)

    def share(self, gather: Callable[[Any], list[Any]]) -> None:
        """With several ranks: counts on each the findings of all since the last call. UserError as `Skips.take`.

        `gather` gives the JSON documents of all ranks, in their order; all ranks call this at the same time.
        """
        if self.ranks == 1:
            return
        mine = [*self._unshared]
        self._unshared.clear()
        for look in sorted((SkipEvent(*each) for its in gather(mine) for each in its), key=lambda look: look.position):
            self.skips.take(look, self.dataset.size)

    def first(self, position: int) -> Batch:
        """The micro-batch at a position, with its draws, made here and now; nothing is counted."""
        asked, _ = next(self.tasks(position))
        task, collated = layouts.parts(self._collator, asked)[0]
        _, (batch, _) = self._ready([(task, self._collator.mended(task, collated))])[0]
        return batch

    def report(self) -> dict[str, Any]:
        """The source and the samples left out, for data.json."""
        found = skipped.merged(
            self.dataset.report(), self.dataset.notes(self.batch_size, self.images), self.skips.reasons
        )
        about = {"source": self.dataset.settings.kinds, "count": self.dataset.size, "skipped": found}
        return about | ({"captions": self.captions} if len(self.captions) > 1 else {})

    def document(self) -> dict[str, Any]:
        """The document for a checkpoint; the position is in the training state."""
        return {"samples": self.dataset.fingerprint, "captions": self.captions, "skips": self.skips.document()}

    def restore(self, document: Mapping[str, Any], may_differ: bool = False) -> None:
        """Restores a `document`. UserError if the source no longer holds the same samples, unless they `may_differ`."""
        if document["samples"] != self.dataset.fingerprint and not may_differ:
            raise UserError(
                "the data set has changed since this run was started: files were added, removed, renamed, damaged "
                f"or repaired (now {self.dataset.size} samples). Restore the files to continue this run exactly, "
                "continue on the data as they are with allow_change=[data], or start a new run from these weights with "
                "init_from=RUN run_name=NEW",
                code="changed",
            )
        self.skips.restore(document["skips"])


def pinned(batch: Batch) -> Batch:
    """The batch in pinned memory, from which a GPU copies without anybody waiting, what stays on the host as well: the
    loop sends it the valid slots."""
    return batch.map(Tensor.pin_memory, lambda value: value.pin_memory() if isinstance(value, Tensor) else value)


def fixed_batches(
    dataset: Dataset,
    num_samples: int,
    size_of: Callable[[Bucket], int],
    rank: int = 0,
    ranks: int = 1,
    images: Images = NO_IMAGES,
    columns: tuple[str, ...] = (),
    alone: bool = False,
    seed: int | None = None,
) -> Iterator[Batch]:
    """The first samples of a data set in its own order, captions kept, centre crops, no flips: for validation. With the
    `seed` of a run as its training draws them, as a cache of what is trained on has no other crops and captions.

    `size_of` gives the most samples of a batch of a bucket, if each does not stand `alone`. Each rank gets its batches,
    all as many: where there are not enough, the last one once more without a valid sample.
    """
    members = without_chance(dataset) if seed is None else dataset.members
    collator, tasks = Collator(members, seed or 0, images, columns), []
    for number, reads in dataset.first(num_samples):
        bucket, count = dataset.buckets[number], len(reads.numbers)
        # Where layouts differ, none can be computed with another for sure, and each rank has to know beforehand how
        # many batches there are.
        size = 1 if alone or references(images) is not None else min(size_of(bucket), -(-count // ranks))
        tasks += [Task(reads.part(start, start + size), bucket) for start in range(0, count, size)]
    for index in range(rank, -(-len(tasks) // ranks) * ranks, ranks):
        task = tasks[min(index, len(tasks) - 1)]
        batch = collator.mended(task, collator.collate(task))[0]
        yield batch if index < len(tasks) else replace(batch, valid_B=torch.zeros_like(batch.valid_B))


def fixed_captions(dataset: Dataset, num_samples: int) -> list[str]:
    """The captions of the same samples; no image is decoded."""
    return [caption for _, caption in _captions(dataset, num_samples)][:num_samples]


def have_joined_captions(dataset: Dataset, num_samples: int) -> list[bool]:
    """Of each of the same samples: whether several lines of its caption are joined although no setting says so."""
    records = islice(_records(dataset, num_samples), num_samples)
    return [captions.is_joined_of_lines(record.texts, dataset.members[m].settings) for m, record, _ in records]


def tags(dataset: Dataset) -> dict[str, dict[str, int]]:
    """By source: the tags (what stands between commas) of the captions, each with its frequency, as sd-scripts counts
    them. {} where not all captions can be read in a moment: of an endless, a remote or a large data set."""
    if dataset.size is None or dataset.size > _COUNTED or any(member.remote for member in dataset.members):
        return {}
    names = [name or NAMELESS for name in dataset.settings.named()]
    found: dict[str, Counter[str]] = {name: Counter() for name in names}
    for member, caption in _captions(dataset, None):
        found[names[member]].update(tag for part in caption.split(",") if (tag := part.strip().lower()))
    return {name: dict(own.most_common()) for name, own in found.items()}


def _captions(dataset: Dataset, num_samples: int | None) -> Iterator[tuple[int, str]]:
    """The source's number and the caption of each of the first samples; None: of all."""
    members = without_chance(dataset)
    for member, record, key in _records(dataset, num_samples):
        with suppress(Undecodable):
            yield member, captions.choose(record, members[member].settings, 0, key)


def _records(dataset: Dataset, num_samples: int | None) -> Iterator[tuple[int, Record, np.ndarray]]:
    """The source's number, the record and the key of each of the first samples that can be read; None: of all."""
    for _, reads in dataset.first(num_samples):
        for member, number, key in zip(reads.members.tolist(), reads.numbers.tolist(), reads.keys, strict=True):
            with suppress(Undecodable):
                yield member, retrying(dataset.members[member].source.record, number), key


def without_chance(dataset: Dataset) -> tuple[Member, ...]:
    """The sources with centre crops, no flips, and no dropped captions or reference images."""
    plain = {"caption_dropout": 0.0, "reference_dropout": 0.0, "random_flip": False, "crop": "center"}
    return tuple(m._replace(settings=m.settings.model_copy(update=plain)) for m in dataset.members)


def _prefetched(thread: ThreadPoolExecutor, make: Callable[[], list[Part]], size: int) -> Iterator[list[Part]]:
    """Values of `make` in order, `size` of them ready or in the making; an error comes where its value would have."""
    ready = deque(thread.submit(make) for _ in range(size))
    while True:
        collated = ready.popleft().result()
        ready.append(thread.submit(make))
        yield collated
