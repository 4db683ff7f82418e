"""The samples of a source that are trained on, and those left out: by filters, split and buckets, from the index."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

import numpy as np
import pyarrow.compute as pc

from daguerre import __version__, keys
from daguerre.data import skipped
from daguerre.data.images import kinds
from daguerre.data.index.bitmap import Bitmap, Through, packed
from daguerre.data.index.cache import cannot_write
from daguerre.data.index.file import TEXT_LIMIT
from daguerre.data.index.index import PART_SAMPLES, Column, Index, Large
from daguerre.data.plan import buckets as bucketing
from daguerre.data.plan import kept
from daguerre.data.plan.buckets import Bucket
from daguerre.data.plan.kept import Choice
from daguerre.data.plan.order import EpochOrder
from daguerre.data.settings import SourceSettings
from daguerre.data.skipped import SkipReport
from daguerre.data.source import Split, cache_of
from daguerre.errors import UserError

BOTH: tuple[Split, ...] = ("train", "held_out")


@dataclass(frozen=True)
class Selection:
    """The samples of one split that are trained on, in the source's order: M of N, in S shards."""

    numbers: Column
    """[M] int64, ascending."""
    ids: Column
    """[M] int64."""
    shard_starts: np.ndarray
    """[S + 1] int64: the first place of each shard in `numbers`, and M."""
    shares: np.ndarray
    """[S] float64: the share of each shard's samples that is in `numbers`."""
    buckets: np.ndarray
    """[M] int16: bucket of each."""
    left_out: SkipReport
    """Left out by filters and buckets, of both splits."""
    images: Mapping[str, int]
    """How many have this further image; what no sample has is not named."""
    by_shard: np.ndarray | None = None
    """[S, number of buckets] int32: how many of each bucket are in each shard. None: a small set is counted when that
    is asked."""
    fingerprint: str = ""
    """The digest of `add_to`; empty where it was not computed beforehand."""

    def order(self, settings: SourceSettings, seed: int, num_buckets: int) -> EpochOrder:
        """The stream in which these samples are trained on."""
        rules = (settings.repeats, settings.shuffle, settings.lanes, settings.lane_samples)
        return EpochOrder(seed, self.shard_starts, self.buckets, num_buckets, *rules, self.by_shard)

    def in_buckets(self, num_buckets: int) -> np.ndarray:
        """[number of buckets] int64: how many are in each."""
        if self.by_shard is not None:
            return self.by_shard.sum(axis=0, dtype=np.int64)
        return np.bincount(self.buckets, minlength=num_buckets)

    def add_to(self, digest: blake2b) -> None:
        """Adds ids, shards and buckets to a digest."""
        for column, kind in ((self.ids, "<i8"), (self.shard_starts, "<i8"), (self.buckets, "<i2")):
            digest.update(len(column).to_bytes(8, "little"))
            for start in range(0, len(column), PART_SAMPLES):
                digest.update(column[start : start + PART_SAMPLES].astype(kind).tobytes())


def select(
    index: Index,
    settings: SourceSettings,
    splits: Sequence[Split],
    name: str = "",
    images: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> list[Selection]:
    """The samples of each split that the settings of a source (called `name` in a mix) choose, of those that have all
    further `images`, and a number in all `columns` of their metadata; `held_out` may be empty.

    What is chosen of a large set is kept in a file of its cache folder. UserError if filters or buckets leave nothing,
    or no sample has one of the images or numbers.
    """
    if (large := index.large) is None:
        chosen = _chosen(index, settings, splits, name, images, columns)
        return [_selection(index, each, small=True) for each in chosen]
    folder = cache_of(settings).folder / "indexes"
    path = folder / f"{_key(large, settings, images, columns)}{kept.SUFFIX}"

    def choose() -> list[Choice]:
        with TemporaryFile(dir=folder) as file:
            found = _chosen(index, settings, BOTH, name, images, columns, lambda ids: _write(file, ids, folder))
            file.flush()
            ids = np.memmap(file, np.int64, "r")
            large.check(ids)
            return [_counted(index, each, settings, ids) for each in found]

    found = kept.choices(path, choose)
    return [_selection(index, found[BOTH.index(split)]) for split in splits]


def _write(file: IO[bytes], ids: np.ndarray, folder: Path) -> None:
    try:
        file.write(ids.tobytes())
    except OSError as error:
        raise cannot_write(folder, error) from error


def _key(large: Large, settings: SourceSettings, images: Sequence[str], columns: Sequence[str]) -> str:
    """Of all on which it depends what is chosen, and of more."""
    own = settings.model_dump(mode="json", exclude={"path", "cache_dir", "cache_gb"})
    said = [__version__, large.digest, own, sorted(images), sorted(columns)]
    return blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).hexdigest()


def _counted(index: Index, choice: Choice, settings: SourceSettings, ids: np.ndarray) -> Choice:
    """The choice with what is counted of it, so that nobody reads all of it again; `ids` are of all samples."""
    counted = _selection(index, choice)
    counted = replace(counted, ids=Through(ids, counted.numbers))
    digest = blake2b(digest_size=16)
    counted.add_to(digest)
    starts, number = counted.shard_starts, len(bucketing.buckets(settings))
    by_shard = np.zeros((len(starts) - 1, number), dtype=np.int32)
    for first in range(0, len(choice.buckets), PART_SAMPLES):
        some = choice.buckets[first : first + PART_SAMPLES]
        shards = np.searchsorted(starts, np.arange(first, first + len(some)), side="right") - 1
        cells = np.bincount((shards - shards[0]) * number + some, minlength=(shards[-1] - shards[0] + 1) * number)
        by_shard[shards[0] : shards[-1] + 1] += cells.reshape(-1, number).astype(np.int32)
    return choice._replace(by_shard=by_shard, fingerprint=digest.hexdigest())


def _selection(index: Index, choice: Choice, small: bool = False) -> Selection:
    bits = Bitmap(choice.bits)
    starts = bits.rank(index.shard_starts)
    shares = np.diff(starts) / np.maximum(np.diff(index.shard_starts), 1)
    known = (starts, shares, choice.buckets, choice.left_out, choice.images)
    if small:
        numbers = bits[:]
        return Selection(numbers, index.ids[numbers], *known)
    return Selection(bits, Through(index.ids, bits), *known, choice.by_shard, choice.fingerprint)


@dataclass
class _Counts:
    """Counts of all parts of an index, which are gone through one by one."""

    rejected: dict[str, int] = field(default_factory=dict)
    captionless: int = 0
    lacking: dict[str, int] = field(default_factory=dict)
    """Of images and numbers."""
    left_out: dict[str, int] = field(default_factory=dict)
    """By buckets."""
    enlarged: int = 0
    there: set[str] = field(default_factory=set)
    """Images and numbers (`n:NAME`) that a sample has."""

    def report(self, settings: SourceSettings) -> skipped.Counts:
        """Of samples left out, and of those kept with a notice."""
        enlarged = {"kept, but enlarged: smaller than its bucket": self.enlarged}
        out = {**self.rejected, no_caption(settings): self.captionless, **self.lacking, **self.left_out}
        return skipped.merged(skipped.counted(out), skipped.counted(enlarged, kept=True))


class _Part(NamedTuple):
    """The usable samples of a part of an index, n of them; bits are packed."""

    samples: int
    """Of the part, chosen or not."""
    usable: np.ndarray
    buckets: np.ndarray
    """[n] int16."""
    held_out: np.ndarray
    """Of the n usable ones."""
    lowest: tuple[float, int]
    """The lowest number that was drawn for one, and its place among them."""
    highest: tuple[float, int]
    images: Mapping[str, np.ndarray]
    """Of the n usable ones, by name of the further image."""


def _chosen(
    index: Index,
    settings: SourceSettings,
    splits: Sequence[Split],
    name: str,
    images: Sequence[str],
    columns: Sequence[str],
    seen: Callable[[np.ndarray], None] = lambda ids: None,
) -> list[Choice]:
    """The choices of the splits, without what a large set is counted for; `seen` gets the ids of part after part."""
    check_fields(index, settings, name)
    check_captions(index, settings, name)
    counts, parts = _Counts(), []
    for part in index.parts():
        seen(part.ids[:])
        parts.append(_part(part, settings, images if index.images is not None else (), columns, counts))
    for wanted in images if index.images is not None and index.count else ():
        if wanted not in counts.there:
            raise UserError(kinds.nowhere(wanted, True, index.images or ()), code="missing")
    for column in columns:
        if f"n:{column}" not in counts.there:
            raise no_column(column, index.numbers, name)
    report = counts.report(settings)
    if index.count and not any(len(part.buckets) for part in parts):
        raise UserError(
            f"data{name and '.sources.' + name}: every one of the {index.count:,} samples is left out:\n"
            f"{skipped.table(report)}\n{_way_out(index, settings, counts.captionless)}",
            code="empty",
        )
    if index.held_out is None:
        _mend_draws(parts)
    return [_choice(parts, split, report) for split in splits]


def _part(
    index: Index, settings: SourceSettings, images: Sequence[str], columns: Sequence[str], counts: _Counts
) -> _Part:
    """Chooses of a part of an index, and counts."""
    verdict = settings.filters.evaluate(index)
    captioned_N = captioned(index, settings)
    _add(counts.rejected, verdict.rejected)
    counts.captionless += int((verdict.passes & ~captioned_N).sum())
    whole_N = verdict.passes & captioned_N
    for name in images:
        column = (index.images or {}).get(name)
        has_N = np.zeros(index.count, dtype=bool) if column is None else column.to_numpy(zero_copy_only=False)
        whole_N = _kept(whole_N, has_N, name, kinds.lacking(name, needed=True), counts)
    for name in columns:
        number = index.numbers.get(name)
        has_N = np.zeros(index.count, dtype=bool)
        has_N = has_N if number is None else number.is_valid().to_numpy(zero_copy_only=False)
        whole_N = _kept(whole_N, has_N, f"n:{name}", no_number(name), counts)
    usable = np.flatnonzero(whole_N)
    ids = index.ids[usable]
    assigned = bucketing.assign(settings, index.heights_px[usable], index.widths_px[usable], ids)
    _add(counts.left_out, assigned.left_out)
    counts.enlarged += int(assigned.enlarged.sum())
    fits = assigned.numbers >= 0
    usable, ids = usable[fits], ids[fits]
    whole_N[:] = False
    whole_N[usable] = True
    draws = keys.hashed_uniforms("held_out", ids) if settings.held_out_fraction else np.ones(len(ids))
    own = draws < settings.held_out_fraction if index.held_out is None else index.held_out[usable]
    low, high = (int(np.argmin(draws)), int(np.argmax(draws))) if len(ids) else (0, 0)
    return _Part(
        index.count,
        _packed(whole_N),
        assigned.numbers[fits].astype(np.int16),
        _packed(own),
        (draws[low], low) if len(ids) else (np.inf, 0),
        (draws[high], high) if len(ids) else (-np.inf, 0),
        {n: _packed(of.to_numpy(zero_copy_only=False)[usable]) for n, of in (index.images or {}).items()},
    )


def _kept(chosen_N: np.ndarray, has_N: np.ndarray, name: str, reason: str, counts: _Counts) -> np.ndarray:
    """[N] bool: those chosen that have what is needed; the others are counted."""
    if has_N.any():
        counts.there.add(name)
    _add(counts.lacking, {reason: int((chosen_N & ~has_N).sum())})
    return chosen_N & has_N


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for reason, count in more.items():
        total[reason] = total.get(reason, 0) + count


def _packed(bits: np.ndarray) -> np.ndarray:
    return np.packbits(bits, bitorder="little")


def _bits(bytes_of: np.ndarray, count: int | None = None) -> np.ndarray:
    return np.unpackbits(bytes_of, count=count, bitorder="little").astype(bool)


def _mend_draws(parts: Sequence[_Part]) -> None:
    """Sees to it that neither split is empty, and that a single sample is trained on. They are drawn with
    `held_out_fraction` each from a hash of the id, so that new samples move no old one to the other split. If none (or
    every one) is drawn, the lowest draw is held out (the highest is trained on)."""
    number, drawn = sum(len(part.buckets) for part in parts), sum(int(_bits(part.held_out).sum()) for part in parts)
    if all(part.lowest[0] >= 1 for part in parts):  # nothing is drawn for a fraction of 0
        return
    lowest, highest = min(parts, key=lambda part: part.lowest[0]), max(parts, key=lambda part: part.highest[0])
    if not drawn and number > 1:
        lowest.held_out[lowest.lowest[1] // 8] |= 1 << lowest.lowest[1] % 8
    if drawn == number:
        highest.held_out[highest.highest[1] // 8] &= ~np.uint8(1 << highest.highest[1] % 8)


def _choice(parts: Sequence[_Part], split: Split, report: SkipReport) -> Choice:
    """The usable samples of the parts that are of a split."""
    images, buckets = dict[str, int](), []

    def chosen() -> Iterator[np.ndarray]:
        for part in parts:
            own = _bits(part.held_out, len(part.buckets)) == (split == "held_out")
            buckets.append(part.buckets[own])
            _add(images, {name: int(_bits(has, len(own))[own].sum()) for name, has in part.images.items()})
            whole = _bits(part.usable, part.samples)
            whole[whole] = own
            yield whole

    bits = packed(chosen())
    joined = np.concatenate([np.zeros(0, dtype=np.int16), *buckets])
    return Choice(bits, joined, np.zeros((0, 0), np.int32), report, images, "")


def no_column(column: str, known: Iterable[str], name: str = "") -> UserError:
    """The refusal of a source (called `name` in a mix) of which no sample has a number that the objective reads."""
    where = f"data{name and '.sources.' + name}"
    there = ", ".join(sorted(known)) or "none"
    return UserError(
        f"{where}: no sample has a number {column!r} in its metadata, which the objective of the recipe reads. Numbers "
        f"that there are: {there}. Metadata is a column of a table, JSON in a tar, or a line of metadata.jsonl in a "
        "folder (docs/data.md)",
        code="missing",
        setting=where,
    )


def no_number(column: str) -> str:
    """The reason for a sample without a number that the objective reads."""
    return f"no number {column!r} in the metadata"


def _way_out(index: Index, settings: SourceSettings, without: int) -> str:
    if not without:
        return "Loosen the filters, or the rules of the buckets (data.buckets)"
    held = [field for field, column in index.captioned.items() if pc.any(column).as_py()]
    others = sorted({*held, *index.texts} - {*settings.captions.fields})
    return f"Name fields that hold text in data.captions.fields; there are: {', '.join(others) or 'none'}"


def check_fields(index: Index, settings: SourceSettings, name: str = "") -> None:
    """UserError if a filter needs metadata that no sample of the source `name` of a mix has."""
    known = {*index.numbers, *index.texts, "width", "height", "aspect"}
    unknown = sorted(settings.filters.fields() - known)
    if unknown and index.count:
        there = ", ".join(sorted(known)) or "none"
        raise UserError(
            f"data{name and '.sources.' + name}.filters: no sample has a field {', '.join(unknown)}. Fields that "
            f"filters can use here: {there}. (Text of {TEXT_LIMIT + 1} characters and more, lists and objects are not "
            "kept for filters.)",
            code="unknown",
            setting=f"data{name and '.sources.' + name}.filters",
        )


def check_captions(index: Index, settings: SourceSettings, name: str = "") -> None:
    """UserError if no sample of the source `name` of a mix has text in one of several caption fields."""
    used = settings.captions.used
    if len(used) < 2:
        return
    held = {field for field in index.captioned if pc.any(index.captioned[field]).as_py()}
    if held & {*used} and (absent := [field for field in used if field not in held]):
        raise UserError(
            f"data{name and '.sources.' + name}.captions.fields: no sample has text in {', '.join(absent)}. Fields "
            f"with text: {', '.join(sorted(held))}. Name those that there are",
            code="unknown",
            setting=f"data{name and '.sources.' + name}.captions.fields",
        )


def no_caption(settings: SourceSettings) -> str:
    """The reason for leaving out a sample that is not `captioned`."""
    return f"no caption in {' or '.join(settings.captions.fields)} (data.captions.fields)"


def captioned(index: Index, settings: SourceSettings) -> np.ndarray:
    """[N] bool: True if a caption field in use holds text, and where that is not known or not needed."""
    if not index.captioned or not settings.captions.used:
        return np.ones(index.count, dtype=bool)
    columns = [index.captioned[field] for field in settings.captions.used if field in index.captioned]
    none = np.zeros(index.count, dtype=bool)
    return np.logical_or.reduce([none, *(column.to_numpy(zero_copy_only=False).astype(bool) for column in columns)])


def unfilled(counts: np.ndarray, buckets: Sequence[Bucket], batch_size: int, listed: bool = False) -> SkipReport:
    """Notes on buckets whose images (`counts` an epoch, of each bucket) do not fill a global batch, and on listed ones
    without images."""
    report: skipped.Counts = {}
    for bucket, count in zip(buckets, counts.tolist(), strict=True):
        if listed and not count:
            skipped.add(report, "bucket of data.buckets.aspects that gets no image", str(bucket), kept=True)
        if 0 < count < batch_size:
            reason = "kept: a bucket with fewer images than a global batch; they wait for the next epoch"
            entry = report.setdefault(reason, {"count": 0, "examples": [], "kept": True})
            entry["count"] += count
            entry["examples"] = [*entry["examples"], f"{bucket} ({count})"][: skipped.EXAMPLES]
    return report
