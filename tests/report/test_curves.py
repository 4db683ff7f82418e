"""Ticks are round, thinning keeps extremes, smoothing has no bias, numbers read well."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daguerre.report import svg
from daguerre.report.svg import Series, chart, format_number, linear_ticks, log_ticks, smooth, thin


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 3000, [0, 1000, 2000, 3000]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.93, 0.991, [0.94, 0.96, 0.98]),
        (-5, 5, [-4, -2, 0, 2, 4]),
    ],
)
def test_linear_ticks(low: float, high: float, ticks: list[float]) -> None:
    assert linear_ticks(low, high) == pytest.approx(ticks)


def test_log_ticks() -> None:
    assert log_ticks(0.04, 1.2) == pytest.approx([0.05, 0.1, 0.2, 0.5, 1.0])
    assert log_ticks(1e-5, 10) == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 10])


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_linear_ticks_lie_inside_and_are_few(low: float, span: float) -> None:
    high = low + span
    if high - low > abs(low) * 1e-9:
        ticks = linear_ticks(low, high)
        assert 1 <= len(ticks) <= 8
        assert all(low - span * 1e-6 <= tick <= high + span * 1e-6 for tick in ticks)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0123456, "0.01235"), (1e-4, "0.0001"), (1.5e-7, "1.5e-7"), (96000, "96,000"), (2e9, "2e9")],
)
def test_number_text(value: float, text: str) -> None:
    assert format_number(value) == text


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
def test_thinning_keeps_ends_and_extremes(ys: list[float]) -> None:
    thinned = thin(Series("s", list(range(len(ys))), ys, "red"))
    assert len(thinned.xs) <= 400
    assert (min(thinned.ys), max(thinned.ys)) == (min(ys), max(ys))
    assert (thinned.xs[0], thinned.xs[-1]) == (0, len(ys) - 1)
    assert all(ys[int(x)] == y for x, y in zip(thinned.xs, thinned.ys, strict=True))


def test_smoothing_is_an_unbiased_mean() -> None:
    assert smooth([3.0] * 100) == pytest.approx([3.0] * 100)
    assert smooth([0.0, 1.0])[1] == pytest.approx(1 / 1.8)
    assert smooth([]) == []


@pytest.mark.parametrize(
    ("ys", "log"), [([1.0, 0.01], True), ([1.0, 0.5], False), ([1.0, 0.0], False), ([5.0, -1], False)]
)
def test_a_log_axis_only_where_it_helps(ys: list[float], log: bool) -> None:
    drawn = chart("Loss", "mean", [Series("loss", [1, 2], ys, "red")], log=True)
    assert drawn is not None
    assert ("log scale" in drawn) is log


@pytest.mark.parametrize("ys", [[0.0], [0.0, 0.0], [1e30, 1e-30], [-3.0], [1e300, 1e299]])
def test_every_point_lies_in_the_frame(ys: list[float]) -> None:
    for options in ({}, {"log": True}, {"zero": True}):
        drawn = chart("c", "u", [Series("s", list(range(len(ys))), ys, "red", dots=True)], **options)
        assert drawn is not None
        assert not math.isnan(len(drawn))
        for piece in drawn.split("<circle ")[1:]:
            x, y = (float(piece.split(f'{name}="')[1].split('"')[0]) for name in ("cx", "cy"))
            assert 0 <= x <= svg.WIDTH
            assert 0 <= y <= svg.HEIGHT


def test_no_points_no_chart() -> None:
    assert chart("c", "u", [Series("s", [], [], "red")]) is None
