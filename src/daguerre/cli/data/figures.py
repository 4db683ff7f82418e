"""Facts, bars and rows about one source for the page of `data stats`, from its index and the samples that were read."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from daguerre.cli.data.opened import Opened
from daguerre.data import skipped
from daguerre.data.folder import scan
from daguerre.data.index import cache
from daguerre.data.index.index import Index
from daguerre.data.plan import buckets as bucketing
from daguerre.data.settings import SourceSettings
from daguerre.data.source import Source
from daguerre.data.tools import statistics
from daguerre.data.tools.statistics import BucketPlan, Column
from daguerre.errors import UserError
from daguerre.formatting import counted, percent
from daguerre.report.dataset_page import BucketRow, Example, Fact, FilterRow, Part
from daguerre.report.svg import Histogram, Mark, format_number

_ASPECT_TICKS = ((1 / 4, "1:4"), (1 / 3, "1:3"), (1 / 2, "1:2"), (2 / 3, "2:3"), (1.0, "1:1"), (3 / 2, "3:2"))
_WIDE_TICKS = ((2.0, "2:1"), (3.0, "3:1"), (4.0, "4:1"))
_MARKED_RESOLUTIONS = 3
_NO_SAMPLES = scan.NO_SAMPLES | {cache.DAMAGED}
_NONE_SMALLER = "none is smaller than its bucket"


def part(
    name: str,
    data: Opened,
    captions: Sequence[str],
    without: int,
    lost: skipped.SkipReport,
    examples: Sequence[Example],
) -> Part:
    """The part of the page about a source; `captions` are of the samples that were read, `without` had none."""
    index, settings = data.index, data.settings
    assert index is not None
    plan = statistics.bucket_plan(index, data.passes, settings)
    when_read = {f"{reason} (of those that were read)": entry for reason, entry in lost.items()}
    return Part(
        name=name,
        samples=index.count,
        summary=_summary(data, index, plan),
        facts=_facts(data, index, plan, captions, without),
        histograms=_histograms(index, data.passes, settings, captions),
        buckets=[
            BucketRow(use.bucket.width_px, use.bucket.height_px, use.samples, use.cropped, use.enlarged)
            for use in plan.used
        ],
        unused_buckets=[str(bucket) for bucket in plan.unused],
        filters=[FilterRow(row.text, row.alone, row.rest) for row in statistics.passing(settings.filters, index)],
        left_out=skipped.merged(data.left_out, skipped.counted(plan.dropped), when_read),
        metadata=[_field(column, index.count) for column in statistics.columns(index)],
        examples=examples,
        notes=_notes(data, index, plan),
    )


def summary(source: Source, settings: SourceSettings, damaged: bool = False) -> list[str]:
    """Lines about all samples of a source, whatever its filters: how many are usable, and how much is cropped.

    `damaged`: some are known to be damaged that the source does not leave out when it is opened.
    """
    index = source.index
    assert index is not None
    but = ", except for those that are damaged" if damaged else ""
    lines = [f"{index.count:,} of {found(source, index):,} samples that were found can be used{but}"]
    with suppress(UserError):  # sizes that the buckets need are not known
        plan = statistics.bucket_plan(index, np.ones(index.count, bool), settings)
        if plan.samples > plan.unknown:
            verb = "is" if plan.enlarged == 1 else "are"
            small = f"{plan.enlarged:,} {verb} smaller than the bucket and enlarged" if plan.enlarged else _NONE_SMALLER
            lines.append(f"cropped: {100 * plan.cropped:.1f} % of an image's pixels, on average; {small}")
    return lines


def found(source: Source, index: Index) -> int:
    """Samples of a source, including those that it leaves out."""
    left_out = {r: e for r, e in source.report().items() if not e.get("kept") and r not in _NO_SAMPLES}
    return index.count + sum(entry["count"] for entry in left_out.values())


def _summary(data: Opened, index: Index, plan: BucketPlan) -> str:
    shards = len(index.shard_starts) - 1
    where = f" in {shards:,} shards" if data.settings.source == "webdataset" and shards > 1 else ""
    first = f"{index.count:,} samples{where}."
    clauses = statistics.passing(data.settings.filters, index)
    by_filter = clauses[-1].rest if clauses else index.count
    passed = int(data.passes.sum())
    if by_filter < index.count:
        first += f" The filters keep {by_filter:,} ({percent(by_filter, index.count)})."
    if passed < by_filter:
        first += f" Without a caption in the caption fields are {by_filter - passed:,}."
    if plan.samples < passed:
        none_of = f"{passed - plan.samples:,}" if plan.samples else "any"
        first += f" No bucket takes {none_of} of them."
    return first


def _notes(data: Opened, index: Index, plan: BucketPlan) -> list[str]:
    notes = []
    if data.source.index is None:
        notes.append(f"This source is endless; these are its first {index.count:,} samples.")
    if plan.unknown:
        notes.append(f"The sizes of {plan.unknown:,} images are not known before they are read.")
    return notes


def _facts(data: Opened, index: Index, plan: BucketPlan, captions: Sequence[str], without: int) -> list[Fact]:
    all_found = found(data.source, index)
    share = f"{percent(plan.samples, all_found)} of the {all_found:,} that were found, those held out among them"
    facts = [Fact("Usable", f"{plan.samples:,}", share)]
    known = statistics.known(index)
    if known.any():
        megapixels = index.heights_px[known].astype(np.float64) * index.widths_px[known] / 1e6
        width, height = (int(np.median(side[known])) for side in (index.widths_px, index.heights_px))
        facts.append(Fact("Median size", f"{width} x {height}", f"{float(np.median(megapixels)):.2g} megapixels"))
    if known.any() and plan.samples:
        facts.append(Fact("Cropped", f"{100 * plan.cropped:.1f} %", "of an image's pixels, on average"))
        share = percent(plan.enlarged, plan.samples)
        note = f"{share} are smaller than their bucket" if plan.enlarged else _NONE_SMALLER
        facts.append(Fact("Enlarged", f"{plan.enlarged:,}", note))
    for image, there in (index.images or {}).items():
        count = int(there.to_numpy(zero_copy_only=False)[data.passes].sum())
        share = percent(count, int(data.passes.sum()))
        facts.append(Fact(f"With a {image}", f"{count:,}", f"{share} of those that pass"))
    facts.append(Fact("Buckets", f"{len(plan.used):,}", f"of {len(plan.used) + len(plan.unused):,} have images"))
    if captions:
        words = int(np.median([len(caption.split()) for caption in captions]))
        letters = int(np.median([len(caption) for caption in captions]))
        facts.append(Fact("Median caption", counted(words, "word"), f"{letters} characters"))
    if without:
        read = len(captions) + without
        facts.append(Fact("Without caption", percent(without, read), f"of {read:,} samples that were read"))
    return facts


def _histograms(index: Index, passes: np.ndarray, settings: SourceSettings, captions: Sequence[str]) -> list[Histogram]:
    found = []
    sides, aspects = statistics.shorter_sides(index, passes), statistics.aspects(index, passes)
    if sides is not None:
        resolutions = sorted(set(settings.buckets.resolutions or (settings.resolution,)))
        marks = [Mark(side, f"{side} px") for side in resolutions[:_MARKED_RESOLUTIONS]]
        found.append(_bars("Shorter side", "px", sides, marks=marks, ticks=_px_ticks(sides.edges)))
    if aspects is not None:
        marks = [Mark(bucket.aspect) for bucket in bucketing.buckets(settings)]
        aspect = _bars("Aspect ratio", "width : height", aspects, marks=marks, ticks=_ASPECT_TICKS + _WIDE_TICKS)
        found.append(replace(aspect, note="The thin lines are the buckets."))
        cropped = statistics.cropped_shares(index, passes, settings)
        if cropped.kept.any():
            found.append(_bars("Cropped", "per cent of an image's pixels", cropped, log=False))
    if captions:
        lengths = statistics.lengths([len(caption.split()) for caption in captions])
        note = f"{len(captions):,} captions that were read; the last bar holds all that are longer."
        found.append(replace(_bars("Caption length", "words", lengths, log=False), note=note))
    return found


def _bars(
    title: str,
    unit: str,
    bars: statistics.Bars,
    log: bool = True,
    marks: Sequence[Mark] = (),
    ticks: Sequence[tuple[float, str]] = (),
) -> Histogram:
    kept, out = bars.kept.tolist(), bars.left_out.tolist()
    return Histogram(title, unit, bars.edges.tolist(), kept, out, log, marks, ticks)


def _px_ticks(edges: np.ndarray) -> list[tuple[float, str]]:
    """Powers of two, with those half-way between where there are few."""
    low, high = math.floor(math.log2(edges[0])), math.ceil(math.log2(edges[-1]))
    values = [2.0**power for power in range(low, high + 1)]
    if edges[-1] / edges[0] < 6:
        values += [1.25 * value for value in values] + [1.5 * value for value in values] + [1.75 * v for v in values]
    return [(value, f"{value:,.0f}") for value in sorted({round(v) for v in values})]


def _field(column: Column, count: int) -> tuple[str, str, str]:
    """A row of the table of metadata: name, share of the samples that have it, its values."""
    if column.values:
        low, middle, high = (format_number(value) for value in column.values)
        values = f"{middle} in the middle, 90 % from {low} to {high}" if low != high else f"always {middle}"
    elif column.common:
        number = f"{'at least ' * column.sampled}{column.distinct:,}"
        many = f"{number} different, most often {', '.join(column.common)}"
        values = many if column.distinct > 1 else f"always {column.common[0]}"
    else:
        values = "text, hardly any value twice" if column.sampled else "text, no value twice"
    return column.name, percent(column.there, count), values
