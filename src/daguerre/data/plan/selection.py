"""The samples of a source that are trained on, and those left out: by filters, split and buckets, from the index."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from daguerre import keys
from daguerre.data import skipped
from daguerre.data.images import kinds
from daguerre.data.index.file import TEXT_LIMIT
from daguerre.data.index.index import Index
from daguerre.data.plan import buckets as bucketing
from daguerre.data.plan.buckets import Bucket
from daguerre.data.plan.order import EpochOrder
from daguerre.data.settings import SourceSettings
from daguerre.data.skipped import SkipReport
from daguerre.data.source import Split
from daguerre.errors import UserError


@dataclass(frozen=True)
class Selection:
    """The samples of one split that are trained on, in the source's order: M of N, in S shards."""

    numbers: np.ndarray
    """[M] int64, ascending."""
    ids: np.ndarray
    """[M] int64."""
    shard_starts: np.ndarray
    """[S + 1] int64: the first place of each shard in `numbers`, and M."""
    shares: np.ndarray
    """[S] float64: the share of each shard's samples that is in `numbers`."""
    buckets: np.ndarray
    """[M] int16: bucket of each."""
    left_out: SkipReport
    """Left out by filters and buckets, of both splits."""

    def order(self, settings: SourceSettings, seed: int, num_buckets: int) -> EpochOrder:
        """The stream in which these samples are trained on."""
        rules = (settings.repeats, settings.shuffle, settings.lanes, settings.lane_samples)
        return EpochOrder(seed, self.shard_starts, self.buckets, num_buckets, *rules)


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

    UserError if filters or buckets leave nothing, or no sample has one of the images or numbers.
    """
    check_fields(index, settings, name)
    check_captions(index, settings, name)
    verdict = settings.filters.evaluate(index)
    captioned_N = captioned(index, settings)
    without = int((verdict.passes & ~captioned_N).sum())
    with_images_N, lacking = _with_images(index, verdict.passes & captioned_N, images)
    whole_N, numberless = _with_columns(index, with_images_N, columns, name)
    usable = np.flatnonzero(whole_N)
    assigned = bucketing.assign(settings, index.heights_px[usable], index.widths_px[usable], index.ids[usable])
    enlarged = {"kept, but enlarged: smaller than its bucket": int(assigned.enlarged.sum())}
    counts = skipped.merged(
        skipped.counted(
            {**verdict.rejected, no_caption(settings): without, **lacking, **numberless, **assigned.left_out}
        ),
        skipped.counted(enlarged, kept=True),
    )
    fits = assigned.numbers >= 0
    usable, buckets = usable[fits], assigned.numbers[fits]
    if index.count and not len(usable):
        raise UserError(
            f"data{name and '.sources.' + name}: every one of the {index.count:,} samples is left out:\n"
            f"{skipped.table(counts)}\n{_way_out(index, settings, without)}",
            code="empty",
        )
    own = index.held_out
    held_out = _held_out(index.ids[usable], settings.held_out_fraction) if own is None else own[usable]
    return [_part(index, usable, buckets, held_out == (split == "held_out"), counts) for split in splits]


def _with_images(index: Index, chosen_N: np.ndarray, images: Sequence[str]) -> tuple[np.ndarray, dict[str, int]]:
    """[N] bool, those chosen that have all `images`; and how many lack one, by reason. UserError where all do."""
    counts: dict[str, int] = {}
    for name in images if index.images is not None else ():
        column = (index.images or {}).get(name)
        has_N = np.zeros(index.count, dtype=bool) if column is None else column.to_numpy(zero_copy_only=False)
        if index.count and not has_N.any():
            raise UserError(kinds.nowhere(name, True, index.images or ()), code="missing")
        counts[kinds.lacking(name, needed=True)] = int((chosen_N & ~has_N).sum())
        chosen_N = chosen_N & has_N
    return chosen_N, counts


def _with_columns(
    index: Index, chosen_N: np.ndarray, columns: Sequence[str], name: str
) -> tuple[np.ndarray, dict[str, int]]:
    """[N] bool, those chosen that have a number in all `columns`; and how many lack one, by reason. UserError where
    all do."""
    counts: dict[str, int] = {}
    for column in columns:
        held = index.numbers.get(column)
        if held is None or held.null_count == len(held):
            raise no_column(column, index.numbers, name)
        has_N = held.is_valid().to_numpy(zero_copy_only=False)
        counts[no_number(column)] = int((chosen_N & ~has_N).sum())
        chosen_N = chosen_N & has_N
    return chosen_N, counts


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


def _part(index: Index, usable: np.ndarray, buckets: np.ndarray, mine: np.ndarray, counts: skipped.Counts) -> Selection:
    numbers = usable[mine]
    starts = np.searchsorted(numbers, index.shard_starts)
    shares = np.diff(starts) / np.maximum(np.diff(index.shard_starts), 1)
    return Selection(numbers, index.ids[numbers], starts, shares, buckets[mine].astype(np.int16), counts)


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


def _held_out(ids: np.ndarray, fraction: float) -> np.ndarray:
    """[M] bool: drawn with `fraction` each from a hash of the id, so that new samples move no old one to the other
    split. If none (or every one) is drawn, the lowest draw is held out (the highest is trained on)."""
    if fraction == 0 or len(ids) < 2:
        return np.zeros(len(ids), dtype=bool)
    draws = keys.hashed_uniforms("held_out", ids)
    chosen = draws < fraction
    if not chosen.any():
        chosen[np.argmin(draws)] = True
    if chosen.all():
        chosen[np.argmax(draws)] = False
    return chosen


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
