"""Figures of a data set from its index: sizes, shapes, what each filter passes, what buckets crop, enlarge and drop.

No image is read; the page is `report/dataset_page.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from daguerre.data.filters.filter import Filters
from daguerre.data.index.index import Index
from daguerre.data.plan import buckets as bucketing
from daguerre.data.plan.buckets import Bucket
from daguerre.data.settings import SourceSettings

BINS = 36
ASPECT_LIMIT = 4.0
"""Longer images are counted in the outermost bars."""
TEXTS_COUNTED = 200_000
"""Most texts of a field that are counted, evenly spread."""
_COMMON = 3


@dataclass(frozen=True)
class Bars:
    """Counts of samples between edges, of those that pass the filters and of those that do not."""

    edges: np.ndarray
    """[n + 1] float64."""
    kept: np.ndarray
    """[n] int64."""
    left_out: np.ndarray
    """[n] int64."""


@dataclass(frozen=True)
class BucketUse:
    """The samples of one bucket."""

    bucket: Bucket
    samples: int
    cropped: float
    """Mean share of the images' pixels that no crop shows."""
    enlarged: int
    """Images that are smaller than the bucket."""


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of the samples that pass the filters."""

    used: tuple[BucketUse, ...]
    """Buckets with images, from tall to wide."""
    unused: tuple[Bucket, ...]
    dropped: Mapping[str, int]
    """Samples that no bucket takes, by reason."""
    samples: int
    cropped: float
    """Mean over all."""
    enlarged: int
    unknown: int
    """Samples of unknown size, which `cropped` leaves out."""


@dataclass(frozen=True)
class Passing:
    """One condition of the filters."""

    text: str
    alone: int
    """Samples that pass it."""
    rest: int
    """Samples that pass it and all before it."""


@dataclass(frozen=True)
class Column:
    """One field of the metadata, as filters see it."""

    name: str
    there: int
    """Samples that have it."""
    values: tuple[float, ...] = ()
    """5th, 50th and 95th percentile of a number."""
    distinct: int = 0
    """Different values of a text."""
    common: tuple[str, ...] = ()
    """Its most frequent values; empty if none comes twice."""
    sampled: bool = False
    """True if only some of the texts were counted."""


def shorter_sides(index: Index, passes: np.ndarray) -> Bars | None:
    """Histogram of the shorter side in px, logarithmic; None if no size is known."""
    sized = known(index)
    if not sized.any():
        return None
    shorter = np.minimum(index.heights_px[:], index.widths_px[:])[sized].astype(np.float64)
    low, high = float(shorter.min()), float(shorter.max())
    return _bars(shorter, passes[sized], np.geomspace(low * 0.94, high * 1.06, BINS + 1))


def aspects(index: Index, passes: np.ndarray) -> Bars | None:
    """Histogram of width over height, logarithmic, symmetrical about the square; None if no size is known."""
    sized = known(index)
    if not sized.any():
        return None
    ratio = index.widths_px[sized] / index.heights_px[sized]
    limit = min(ASPECT_LIMIT, max(2.0, float(np.exp(np.abs(np.log(ratio)).max()))) * 1.02)
    edges = np.geomspace(1 / limit, limit, BINS + 2)  # an odd number of bars: one is the square's
    return _bars(ratio.clip(1 / limit, limit), passes[sized], edges)


def lengths(counts: Sequence[int]) -> Bars:
    """Histogram of whole numbers from 0, such as words of captions; the last bar holds all beyond."""
    values = np.asarray(counts, dtype=np.int64)
    high = int(np.quantile(values, 0.995)) if len(values) else 1
    width = max(1, -(-(high + 1) // BINS))
    edges = np.arange(0, high + width + 1, width, dtype=np.float64)
    return _bars(values.clip(0, edges[-1]), np.ones(len(values), bool), edges)


def _bars(values: np.ndarray, passes: np.ndarray, edges: np.ndarray) -> Bars:
    kept, out = (np.histogram(values[which], bins=edges)[0] for which in (passes, ~passes))
    return Bars(edges, kept, out)


def known(index: Index) -> np.ndarray:
    """[N] bool: samples whose sizes are known."""
    return (index.heights_px[:] > 0) & (index.widths_px[:] > 0)


def bucket_plan(index: Index, passes: np.ndarray, settings: SourceSettings) -> BucketPlan:
    """The buckets of the samples that pass. UserError if sizes that the buckets need are not known."""
    every = bucketing.buckets(settings)
    heights_px, widths_px = index.heights_px[passes], index.widths_px[passes]
    assigned = bucketing.assign(settings, heights_px, widths_px, index.ids[passes])
    sized = known(index)[passes]
    cropped = _cropped(heights_px, widths_px, assigned.numbers, every)
    used = []
    for number, bucket in enumerate(every):
        there = assigned.numbers == number
        if there.any():
            share = float(cropped[there & sized].mean()) if (there & sized).any() else 0.0
            used.append(BucketUse(bucket, int(there.sum()), share, int(assigned.enlarged[there].sum())))
    taken = {use.bucket for use in used}
    seen = sized & (assigned.numbers >= 0)
    return BucketPlan(
        tuple(sorted(used, key=lambda use: (use.bucket.aspect, use.bucket.area_px))),
        tuple(bucket for bucket in every if bucket not in taken),
        assigned.left_out,
        int((assigned.numbers >= 0).sum()),
        float(cropped[seen].mean()) if seen.any() else 0.0,
        int(assigned.enlarged.sum()),
        int((~sized).sum()),
    )


def cropped_shares(index: Index, passes: np.ndarray, settings: SourceSettings) -> Bars:
    """Histogram of the per cent of an image's pixels that no crop shows, of those that pass and have a bucket."""
    which = passes & known(index)
    heights_px, widths_px = index.heights_px[which], index.widths_px[which]
    numbers = bucketing.assign(settings, heights_px, widths_px, index.ids[which]).numbers
    fits = numbers >= 0
    shares = _cropped(heights_px[fits], widths_px[fits], numbers[fits], bucketing.buckets(settings))
    percents = 100 * shares
    high = max(10.0, float(percents.max(initial=0.0)) * 1.001)
    return _bars(percents, np.ones(len(percents), bool), np.linspace(0, high, BINS + 1))


def _cropped(heights_px: np.ndarray, widths_px: np.ndarray, numbers: np.ndarray, every: Sequence[Bucket]) -> np.ndarray:
    """[N] float64: the share of each image that is outside its bucket once it just covers it."""
    tall = np.array([bucket.height_px for bucket in every], dtype=np.float64)[numbers]
    wide = np.array([bucket.width_px for bucket in every], dtype=np.float64)[numbers]
    heights, widths = np.maximum(heights_px, 1), np.maximum(widths_px, 1)
    scale = np.maximum(tall / heights, wide / widths)
    return (1.0 - tall * wide / (heights * widths * scale**2)).clip(0.0)


def passing(filters: Filters, index: Index) -> list[Passing]:
    """The samples that pass each condition that a top-level `and` joins."""
    rest = np.ones(index.count, bool)
    found = []
    for clause in filters.clauses():
        alone = clause.evaluate(index).passes
        rest &= alone
        found.append(Passing(str(clause), int(alone.sum()), int(rest.sum())))
    return found


def columns(index: Index) -> list[Column]:
    """All fields that filters can use, by name."""
    found = []
    for name in sorted({*index.numbers, *index.texts}):
        if name in index.numbers:
            found.append(_number(name, index.numbers[name]))
        if name in index.texts:
            found.append(_text(name, index.texts[name]))
    return [column for column in found if column.there]


def _number(name: str, column: pa.Array) -> Column:
    values = column.drop_null().to_numpy(zero_copy_only=False)
    points = tuple(float(v) for v in np.quantile(values, (0.05, 0.5, 0.95))) if len(values) else ()
    return Column(name, len(values), points)


def _text(name: str, column: pa.Array) -> Column:
    there = column.drop_null()
    some = there
    if len(there) > TEXTS_COUNTED:
        some = there.take(pa.array(np.linspace(0, len(there) - 1, TEXTS_COUNTED).astype(np.int64)))
    counted = pc.value_counts(some)
    values, counts = counted.field("values"), counted.field("counts").to_numpy()
    most = np.argsort(-counts, kind="stable")[:_COMMON]
    common = tuple(values[i].as_py() for i in most.tolist()) if len(counts) < len(some) else ()
    return Column(name, len(there), distinct=len(counts), common=common, sampled=len(some) < len(there))
