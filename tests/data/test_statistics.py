"""Figures of a data set, against what can be counted by hand."""

import numpy as np
import pyarrow as pa
import pytest

from daguerre.data.filters.filter import Filters
from daguerre.data.index.index import Index
from daguerre.data.settings import BucketSettings, SourceSettings
from daguerre.data.tools import statistics


def index(sizes, **columns) -> Index:
    widths, heights = np.array(sizes, dtype=np.int32).reshape(-1, 2).T
    numbers = {name: pa.array(values, pa.float64()) for name, values in columns.items() if name != "lang"}
    texts = {name: pa.array(values, pa.string()) for name, values in columns.items() if name == "lang"}
    return Index(np.arange(len(widths)), np.array([0, len(widths)]), heights, widths, numbers, texts)


def settings(resolution=64, **buckets) -> SourceSettings:
    return SourceSettings(source="x", resolution=resolution, buckets=BucketSettings(**buckets))


def every(one: Index) -> np.ndarray:
    return np.ones(one.count, bool)


def test_every_size_is_in_one_bar():
    sizes = [(64 + 13 * i, 700 - 7 * i) for i in range(80)] + [(0, 0)]
    one = index(sizes)
    passes = np.arange(81) % 3 > 0
    for bars in (statistics.shorter_sides(one, passes), statistics.aspects(one, passes)):
        assert bars.kept.sum() == passes[:80].sum()
        assert bars.left_out.sum() == (~passes[:80]).sum()
        assert (np.diff(bars.edges) > 0).all()
    sides = statistics.shorter_sides(one, passes)
    assert sides.edges[0] < 64
    assert sides.edges[-1] > max(min(size) for size in sizes)


@pytest.mark.parametrize("sizes", [[(64, 64)] * 3, [(64, 64)], [(9000, 10)], [(10, 9000), (500, 500)]])
def test_few_or_equal_or_extreme_sizes(sizes):
    one = index(sizes)
    for bars in (statistics.shorter_sides(one, every(one)), statistics.aspects(one, every(one))):
        assert bars.kept.sum() == len(sizes)


def test_sizes_that_nobody_knows():
    one = index([(0, 0)] * 4)
    assert statistics.shorter_sides(one, every(one)) is None
    assert statistics.aspects(one, every(one)) is None
    plan = statistics.bucket_plan(one, every(one), settings())
    assert (plan.samples, plan.unknown, plan.cropped) == (4, 4, 0.0)


def test_the_square_has_a_bar_of_its_own():
    one = index([(100, 100)] * 5 + [(150, 100), (100, 150)])
    bars = statistics.aspects(one, every(one))
    middle = len(bars.kept) // 2
    assert bars.kept[middle] == 5
    assert bars.edges[middle] < 1 < bars.edges[middle + 1]
    assert bars.kept.tolist() == bars.kept[::-1].tolist()


@pytest.mark.parametrize("counts", [[], [0], [5] * 9, list(range(40)), [3] * 999 + [100_000]])
def test_lengths_of_captions(counts):
    bars = statistics.lengths(counts)
    assert bars.kept.sum() == len(counts)
    assert (np.diff(bars.edges) >= 1).all()
    assert len(bars.kept) <= statistics.BINS + 1


def test_what_a_square_crops():
    one = index([(64, 64), (128, 64), (64, 256), (32, 32), (128, 128)])
    plan = statistics.bucket_plan(one, every(one), settings())
    (use,) = plan.used
    assert (use.samples, use.enlarged) == (5, 1)
    assert use.cropped == pytest.approx((0 + 1 / 2 + 3 / 4 + 0 + 0) / 5)
    assert (plan.cropped, plan.enlarged, plan.dropped, plan.unused) == (use.cropped, 1, {}, ())
    shares = statistics.cropped_shares(one, every(one), settings())
    assert shares.kept.sum() == 5
    assert shares.edges[-1] == pytest.approx(75, rel=0.01)


def test_each_image_is_in_the_bucket_that_crops_it_least():
    one = index([(128, 64)] * 3 + [(64, 128)] * 2 + [(96, 96)])
    plan = statistics.bucket_plan(one, every(one), settings(96, aspects="auto", step=16))
    found = {str(use.bucket): (use.samples, round(use.cropped, 2)) for use in plan.used}
    assert sum(samples for samples, _ in found.values()) == 6
    assert found["96x96"] == (1, 0.0)
    assert [use.bucket.aspect for use in plan.used] == sorted(use.bucket.aspect for use in plan.used)
    assert all(samples for samples, _ in found.values())
    assert not {use.bucket for use in plan.used} & set(plan.unused)


def test_what_no_bucket_takes_is_dropped_by_reason():
    one = index([(64, 64), (32, 32), (200, 40)])
    plan = statistics.bucket_plan(one, every(one), settings(upscale=False))
    assert plan.samples == 1
    assert sum(plan.dropped.values()) == 2
    passes = np.array([True, False, True])
    assert statistics.bucket_plan(one, passes, settings(upscale=False)).dropped == {next(iter(plan.dropped)): 1}


def test_what_each_condition_passes():
    one = index([(9, 9)] * 6, score=[1, 2, 3, 4, None, 6], lang=["en", "en", None, "de", "en", "en"])
    rows = statistics.passing(Filters("score > 1 and lang == 'en' and score < 6"), one)
    assert [(row.text, row.alone, row.rest) for row in rows] == [
        ("score > 1", 4, 4),
        ("lang == 'en'", 4, 2),
        ("score < 6", 4, 1),
    ]
    assert statistics.passing(Filters(), one) == []


def test_fields_of_the_metadata():
    one = index([(9, 9)] * 5, score=[1.0, 2.0, 3.0, None, 5.0], lang=["en", "en", "de", None, "en"], none=[None] * 5)
    score, lang = reversed(statistics.columns(one))
    assert (score.name, score.there, score.values[1]) == ("score", 4, 2.5)
    assert (lang.name, lang.there, lang.distinct, lang.common) == ("lang", 4, 2, ("en", "de"))
    assert not lang.sampled
    unlike = statistics.columns(index([(9, 9)] * 3, lang=["a", "b", "c"]))[0]
    assert (unlike.distinct, unlike.common) == (3, ())


def test_of_very_many_texts_some_are_counted(monkeypatch):
    monkeypatch.setattr(statistics, "TEXTS_COUNTED", 100)
    (column,) = statistics.columns(index([(9, 9)] * 1000, lang=["en", "de"] * 500))
    assert (column.there, column.distinct, column.sampled) == (1000, 2, True)
    (column,) = statistics.columns(index([(9, 9)] * 1000, lang=[str(i) for i in range(1000)]))
    assert (column.common, column.sampled) == ((), True)
