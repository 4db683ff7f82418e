"""A data set as training meets it: the sources of a recipe opened, their samples chosen, and the plan of their
batches."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from daguerre import keys, plugins
from daguerre.conditions import condition as conditions
from daguerre.conditions.condition import NO_IMAGES, Images
from daguerre.data import skipped
from daguerre.data.images import kinds
from daguerre.data.images.headers import Undecodable, is_transparent
from daguerre.data.index.cache import DAMAGED
from daguerre.data.index.index import Index
from daguerre.data.plan import buckets as bucketing
from daguerre.data.plan import cache_window, selection
from daguerre.data.plan.batches import BatchPlan, Slots
from daguerre.data.plan.buckets import Bucket
from daguerre.data.plan.order import EpochOrder, InfiniteOrder, Order
from daguerre.data.plan.selection import Selection
from daguerre.data.settings import SharedSettings, SourceSettings
from daguerre.data.skipped import SkipReport
from daguerre.data.source import RemoteSource, Source, Split
from daguerre.errors import UserError
from daguerre.types import ALPHA, IMAGE, MASK, REFERENCES, Record


class Member(NamedTuple):
    """A source and its settings: what it takes to read a sample, and small enough to travel to a worker."""

    settings: SourceSettings
    source: Source
    remote: RemoteSource | None = None
    """The source again, where its samples come over a network."""


class ReadRequest(NamedTuple):
    """Samples to read: their members and numbers [n] and their keys [n, 3] of (sample id, epoch, repeat), all int64."""

    members: np.ndarray
    numbers: np.ndarray
    keys: np.ndarray

    def part(self, start: int, stop: int) -> ReadRequest:
        """Samples `start` to `stop` of these."""
        return ReadRequest(*(array[start:stop] for array in self))

    def at(self, rows: Sequence[int]) -> ReadRequest:
        """These samples alone."""
        return ReadRequest(*(array[list(rows)] for array in self))


@dataclass(frozen=True, eq=False)
class Dataset:
    """The samples of one split."""

    settings: SharedSettings
    """What holds for all members: shapes and sizes."""
    members: tuple[Member, ...]
    selections: tuple[Selection | None, ...]
    """What is chosen of each member; None of an endless one."""
    weights: tuple[Fraction, ...]
    buckets: tuple[Bucket, ...]

    @property
    def count(self) -> int | None:
        """Samples of an epoch, repeats included; None where it is endless or several sources keep epochs of their
        own."""
        if len(self.members) > 1 or self.selections[0] is None:
            return None
        return len(self.selections[0].numbers) * self.members[0].settings.repeats

    @property
    def size(self) -> int | None:
        """Different samples; None where a source is endless."""
        sizes = [None if chosen is None else len(chosen.numbers) for chosen in self.selections]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def measured(self) -> Member | None:
        """The source whose images a metric can read; None for no such source, or several."""
        found = [member for member in self.members if member.source.metric is not None]
        return found[0] if len(found) == 1 else None

    def plan(self, seed: int, batch_size: int) -> BatchPlan:
        """The batches of a run. UserError where an epoch of all sources does not fill one, or the cache has
        no room for the remote files that they read."""
        per_epoch = [
            None if chosen is None else len(chosen.numbers) * member.settings.repeats
            for member, chosen in zip(self.members, self.selections, strict=True)
        ]
        shown = sum(n for n in per_epoch if n is not None)
        if None not in per_epoch and shown < batch_size:
            repeats = "data.sources.NAME.repeats"
            if len(self.members) == 1:
                repeats = f"data.repeats={-(-batch_size * self.members[0].settings.repeats // max(shown, 1))}"
            raise UserError(
                f"training.global_batch_size: a batch of {batch_size:,} samples is larger than an epoch of the data "
                f"set ({self.size:,} to train on): {repeats} shows each sample several times an epoch, or "
                f"training.global_batch_size={max(shown, 1)} is the largest batch that fits",
                code="conflict",
                setting="training.global_batch_size",
            )
        orders: list[Order] = []
        for i, (member, chosen) in enumerate(zip(self.members, self.selections, strict=True)):
            # Sources of equal size go in orders of their own; a single one by the seed itself.
            own = seed if not i else int(keys.words(seed, "source", i, count=1)[0])
            of = None if chosen is None else chosen.order(member.settings, own, len(self.buckets))
            orders.append(of or InfiniteOrder(len(self.buckets)))
        chosen_buckets = [None if chosen is None else chosen.buckets for chosen in self.selections]
        if remote := self.remote_streams(orders):
            where = "data." if len(self.members) == 1 else "data.sources.NAME."
            cache_window.check_cache_size(remote, batch_size, self.settings.cache_gb, where)
        return BatchPlan(seed, orders, chosen_buckets, self.weights, len(self.buckets), batch_size)

    def remote_streams(self, orders: Sequence[Order]) -> list[cache_window.Stream]:
        """The remote sources, in the orders of a plan."""
        return [
            cache_window.Stream(order, member.remote.files, weight / sum(self.weights))
            for member, order, weight in zip(self.members, orders, self.weights, strict=True)
            if member.remote is not None and isinstance(order, EpochOrder)
        ]

    def reads(self, slots: Slots) -> ReadRequest:
        """The records to read for slots of the plan."""
        numbers, ids = slots.indexes.copy(), slots.indexes.copy()
        for i, (member, chosen) in enumerate(zip(self.members, self.selections, strict=True)):
            where = np.flatnonzero(slots.members == i)
            if chosen is not None:
                numbers[where], ids[where] = chosen.numbers[numbers[where]], chosen.ids[ids[where]]
            else:
                ids[where] = [member.source.sample_id(int(number)) for number in numbers[where]]
            ids[where] ^= _salt(i)
        return ReadRequest(slots.members, numbers, np.stack([ids, slots.epochs, slots.repeats], axis=1))

    def remote_files_of(self, slots: Slots) -> Iterator[tuple[RemoteSource, int]]:
        """The remote files that slots are read from, each once, in the order of their first use."""
        for i, (member, chosen) in enumerate(zip(self.members, self.selections, strict=True)):
            if chosen is not None and member.remote is not None:
                indexes = slots.indexes[slots.members == i]
                shards = np.searchsorted(chosen.shard_starts, indexes, side="right") - 1
                for file in dict.fromkeys(member.remote.files.of_shards[shards].tolist()):
                    yield member.remote, file

    def first(self, number: int | None) -> list[tuple[int, ReadRequest]]:
        """About `number` samples, equally many of each source in its order, grouped by bucket: (bucket,
        reads). None: all of them, where none is endless."""
        each = sys.maxsize if number is None else -(-number // len(self.members))
        found: dict[int, list[ReadRequest]] = {}
        for member, chosen in enumerate(self.selections):
            indexes = np.arange(each if chosen is None else min(each, len(chosen.numbers)), dtype=np.int64)
            of = np.zeros_like(indexes) if chosen is None else chosen.buckets[indexes].astype(np.int64)
            for bucket in np.unique(of).tolist():
                there = indexes[of == bucket]
                zeros = np.zeros_like(there)
                found.setdefault(bucket, []).append(self.reads(Slots(zeros + member, there, zeros, zeros, zeros)))
        return [
            (bucket, ReadRequest(*map(np.concatenate, zip(*parts, strict=True)))) for bucket, parts in found.items()
        ]

    def report(self) -> SkipReport:
        """Samples left out when the sources were opened, by reason."""
        return self._found

    @cached_property
    def _found(self) -> SkipReport:
        parts = [member.source.report() for member in self.members]
        return skipped.merged(*parts, *(chosen.left_out for chosen in self.selections if chosen is not None))

    def notes(self, batch_size: int, images: Images = NO_IMAGES) -> SkipReport:
        """Notices about the plan: buckets that wait for the next epoch, samples that have none of the `images`, the
        further images that are wanted of a sample, and those that have some which are not wanted."""
        counts = np.zeros(len(self.buckets), dtype=np.int64)
        for member, chosen in zip(self.members, self.selections, strict=True):
            if chosen is not None:
                counts += member.settings.repeats * chosen.in_buckets(len(self.buckets))
        listed = isinstance(self.settings.buckets.aspects, tuple)
        return skipped.merged(
            selection.unfilled(counts, self.buckets, batch_size, listed),
            self._lacking(kinds.stored(images)),
            self._unread(kinds.stored(images)),
        )

    def check_present(self, images: Images) -> None:
        """UserError where no sample has one of the further images. Where samples may have none, of reference images
        the first alone is asked for, and only where an index says so of every sample."""
        indexes = [member.source.index for member in self.members]
        told = REFERENCES[:1] if all(index is not None and index.images is not None for index in indexes) else ()
        for name, needed in kinds.stored(images).items():
            if (needed or name not in REFERENCES or name in told) and not any(self._share_with(name)):
                there = {other for index in indexes if index is not None for other in index.images or ()}
                raise UserError(kinds.nowhere(name, needed, there), code="missing" if needed else "unused")

    def _lacking(self, images: Mapping[str, bool]) -> SkipReport:
        found: skipped.Counts = {}
        for name, needed in images.items():
            if name in REFERENCES[1:] and not needed:
                continue  # samples have as many as they have
            shares = zip(self.selections, self._share_with(name), strict=True)
            count = sum(round((1 - share) * len(chosen.numbers)) for chosen, share in shares if chosen is not None)
            if count:
                found[kinds.lacking(name, needed)] = {"count": count, "examples": [], "kept": not needed}
        return found

    def _unread(self, images: Mapping[str, bool]) -> SkipReport:
        """Samples with further images that nothing reads, by what indexes say: nothing is opened for this."""
        found: skipped.Counts = {}
        for member, chosen in zip(self.members, self.selections, strict=True):
            index = member.source.index
            if index is None or index.images is None or chosen is None:
                continue
            for name in index.images.keys() - images.keys():
                if count := chosen.images.get(name, 0):
                    found = skipped.merged(found, {kinds.unread(name): {"count": count, "examples": [], "kept": True}})
        return found

    def _share_with(self, name: str) -> list[float]:
        """The share of the chosen samples of each member that have this further image. Where no index says so,
        the first sample stands for all."""
        shares = []
        for member, chosen in zip(self.members, self.selections, strict=True):
            index = member.source.index
            if name == MASK and member.settings.alpha_mask:
                shares.append(_share_with_alpha(member, chosen))
            elif index is None or index.images is None or chosen is None:
                first = 0 if chosen is None else int(chosen.numbers[0])
                shares.append(float(name in member.source.record(first).images))
            else:
                shares.append(chosen.images.get(name, 0) / max(len(chosen.numbers), 1))
        return shares

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the samples in their shards: what must be equal for a run to go on as if nothing had happened."""
        if len(self.selections) == 1 and self.selections[0] is not None and self.selections[0].fingerprint:
            return self.selections[0].fingerprint
        digest = blake2b(digest_size=16)
        for chosen in self.selections:
            if chosen is None:
                digest.update(b"endless")
            else:
                chosen.add_to(digest)
        return digest.hexdigest()


def _salt(member: int) -> int:
    """Keys that tell samples of equal ids apart that come from several sources, such as 0.png of two folders: else they
    would share their noise. 0 for the first source."""
    return int(keys.words(0, "source", member, count=1)[0]) >> 1 if member else 0


def number_of(record: Record, column: str) -> float | None:
    """A number of a record's metadata; None where it has none that is finite. True is 1."""
    value = record.metadata.get(column)
    if value is None or isinstance(value, str):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def open_dataset(
    settings: SharedSettings, split: Split, images: Images = NO_IMAGES, columns: Sequence[str] = ()
) -> Dataset:
    """Opens the sources and chooses the samples of a split. UserError where there is nothing to train on."""
    return open_datasets(settings, [split], images, columns)[0]


_LOOKED_AT = 1000
"""Images that are opened to see whether any has an alpha channel."""


def _share_with_alpha(member: Member, chosen: Selection | None) -> float:
    """1 if an image may have an alpha channel or a mask, for no index knows which; 0 if none has."""
    numbers = np.zeros(1, np.int64) if chosen is None else chosen.numbers
    if len(numbers) > _LOOKED_AT:
        return 1.0
    for number in numbers[:].tolist():
        with suppress(Undecodable):
            images = member.source.record(number).images
            image = images.get(IMAGE, images.get(ALPHA, b""))
            if MASK in images or is_transparent(image, member.settings.formats):
                return 1.0
    return 0.0


def open_datasets(
    settings: SharedSettings, splits: Sequence[Split], images: Images = NO_IMAGES, columns: Sequence[str] = ()
) -> list[Dataset]:
    """The data sets of several splits; a source that has an index is opened once for all of them. Samples without a
    stored image of `images` that every sample needs, or without a number in one of the `columns` of metadata, are left
    out. UserError where a condition lacks what it needs, or where no sample has such a number."""
    conditions.check(images)
    weights = tuple(settings.shares())
    needed = [name for name, is_needed in kinds.stored(images).items() if is_needed]
    opened = [_opened(name, own, splits, needed, columns) for name, own in settings.named().items()]
    bucketing.check_not_idle(settings)
    buckets = bucketing.buckets(settings)
    return [
        Dataset(settings, tuple(m[i] for m, _ in opened), tuple(s[i] for _, s in opened), weights, buckets)
        for i in range(len(splits))
    ]


@contextmanager
def naming(name: str, settings: SourceSettings) -> Iterator[None]:
    """Within the context a UserError names settings as they are written of a source of this name; "" is one alone.

    A source does not know which one of several it is, and says `data.path`.
    """
    try:
        yield
    except UserError as error:
        if name:
            flat = rf"\bdata\.(?=(?:{'|'.join(type(settings).model_fields)})\b)"
            error.args = (re.sub(flat, f"data.sources.{name}.", str(error)),)
            error.setting = error.setting and re.sub(flat, f"data.sources.{name}.", error.setting)
        raise


def _opened(
    name: str, settings: SourceSettings, splits: Sequence[Split], needed: Sequence[str], columns: Sequence[str]
) -> tuple[list[Member], list[Selection | None]]:
    """A source for each of the splits, and what is chosen of it."""
    open_source = plugins.find("sources", settings.source).open_source
    with naming(name, settings):
        source: Source = open_source(settings, splits[0])
    index = source.index
    if index is None:
        _refuse_shapes(name, settings)
        for column in columns:  # there is no list of its samples: the first one stands for all
            if number_of(first := source.record(0), column) is None:
                raise selection.no_column(
                    column, (held for held in first.metadata if number_of(first, held) is not None), name
                )
        return [Member(settings, open_source(settings, split)) for split in splits], [None for _ in splits]
    try:
        _refuse_damage(source.report(), index, settings.max_skipped)
    except UserError as error:
        raise UserError(f"data.sources.{name}: {error}" if name else str(error)) from None
    chosen = selection.select(index, settings, splits, name, needed, columns)
    if not isinstance(source, RemoteSource):
        return [Member(settings, source) for _ in splits], list(chosen)
    told = [source.reading(part.shares) for part in chosen]
    return [Member(settings, own, own if own.is_remote else None) for own in told], list(chosen)


def _refuse_damage(found: SkipReport, index: Index, limit: float) -> None:
    """UserError where too much cannot be used; of a damaged shard nobody knows how much, so shards are counted."""
    skipped.check_share(limit, found, index.count + skipped.unusable(found))
    damaged, shards = found.get(DAMAGED, {"count": 0})["count"], len(index.shard_starts) - 1
    if damaged > limit * shards:
        where = f"{damaged:,} damaged place{'s' * (damaged > 1)} in {shards:,} shard{'s' * (shards > 1)}"
        raise UserError(
            f"{where}, with an unknown number of samples "
            f"(data.max_skipped={limit:g}):\n{skipped.table(found)}\nDownload these shards again, or set "
            "data.max_skipped=1 to train on the readable samples",
            code="damaged",
            setting="data.max_skipped",
        )


def _refuse_shapes(name: str, settings: SourceSettings) -> None:
    """UserError where an endless source, of whose samples no size is known beforehand, meets several buckets."""
    count = len(bucketing.buckets(settings))
    if count > 1:
        raise UserError(
            f"data.sources.{name}: {settings.source} is endless, so the sizes of its images are not known in advance "
            f"and cannot be sorted into the {count} buckets of data.buckets. Remove this source, or train on one "
            "shape (data.buckets.aspects=square, data.buckets.resolutions=null)",
            code="conflict",
        )
