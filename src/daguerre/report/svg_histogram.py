"""Histograms as inline SVG: bars between given edges, kept and left out in two shades, marks where something changes.

Knows nothing of data sets: a histogram is a title, a unit, edges and counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daguerre.report.markup import Html, element, join
from daguerre.report.svg_curves import Scale, linear_ticks, number_text

WIDTH, HEIGHT = 480, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 472, 18, 200
_TICK_SPACE = 46


@dataclass(frozen=True)
class Mark:
    """A line through a histogram at a value of its axis."""

    value: float
    text: str = ""
    """Short; empty for a thin line without words."""


@dataclass(frozen=True)
class Histogram:
    """Counts between edges."""

    title: str
    unit: str
    """What the axis counts, such as `px`."""
    edges: Sequence[float]
    """[n + 1], ascending."""
    kept: Sequence[int]
    """[n]."""
    left_out: Sequence[int] = ()
    """[n] more, which filters reject; empty if there are none."""
    log: bool = False
    """Logarithmic axis."""
    marks: Sequence[Mark] = ()
    ticks: Sequence[tuple[float, str]] = ()
    """Where the axis is labelled, if not at round numbers."""
    note: str = ""
    """Stands below."""


def histogram(one: Histogram) -> Html:
    """The figure. Bars say their range and counts when pointed at."""
    x_scale = Scale(one.edges[0], one.edges[-1], one.log, _LEFT, _RIGHT)
    left_out = one.left_out or [0] * len(one.kept)
    most = max((k + out for k, out in zip(one.kept, left_out, strict=True)), default=0)
    y_scale = Scale(0.0, max(1.0, most * 1.04), False, _BOTTOM, _TOP)
    drawing = element(
        "svg",
        _grid(most, y_scale),
        *(_mark(mark, x_scale) for mark in one.marks if one.edges[0] <= mark.value <= one.edges[-1]),
        *(_bar(one, i, left_out[i], x_scale, y_scale) for i in range(len(one.kept))),
        *_axis(one, x_scale),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{one.title}: histogram",
    )
    caption = element("figcaption", element("b", one.title), element("span", one.unit))
    note = element("p", one.note, class_="note") if one.note else None
    return element("figure", caption, _legend() if any(left_out) else None, drawing, note, class_="chart bars")


def _bar(one: Histogram, i: int, left_out: int, x_scale: Scale, y_scale: Scale) -> Html | None:
    kept = one.kept[i]
    if not kept + left_out:
        return None
    low, high = one.edges[i], one.edges[i + 1]
    start, end = x_scale(low), x_scale(high)
    gap = 1.0 if end - start > 4 else 0.2
    said = f"{number_text(low)} to {number_text(high)}: {kept:,}" + (f", and {left_out:,} left out" if left_out else "")
    parts = []
    for count, below, kind in ((kept, 0, "kept"), (left_out, kept, "out")):
        if count:
            top = y_scale(below + count)
            height = max(0.8, y_scale(below) - top)
            x, width = f"{start + gap / 2:.1f}", f"{max(0.6, end - start - gap):.1f}"
            parts.append(element("rect", x=x, y=f"{top:.1f}", width=width, height=f"{height:.1f}", class_=kind))
    hit = element("rect", x=f"{start:.1f}", y=_TOP, width=f"{end - start:.1f}", height=_BOTTOM - _TOP, class_="hit")
    return element("g", element("title", said), hit, *parts)


def _grid(most: int, y_scale: Scale) -> Html:
    lines = []
    for tick in linear_ticks(0.0, max(1.0, float(most)), 4):
        if tick != int(tick):
            continue
        y = f"{y_scale(tick):.1f}"
        lines.append(element("line", x1=_LEFT, x2=_RIGHT, y1=y, y2=y, class_="grid"))
        lines.append(element("text", _short(tick), x=_LEFT - 6, y=y, dy="0.32em", text_anchor="end"))
    return join(*lines)


def _short(count: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if count >= size:
            return f"{count / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{count:,.0f}"


def _axis(one: Histogram, x_scale: Scale) -> list[Html]:
    """Labels below the bars, as many as have room."""
    ticks = list(one.ticks) or [(value, number_text(value)) for value in linear_ticks(one.edges[0], one.edges[-1], 6)]
    shown: list[Html] = []
    last = float("-inf")
    for value, text in sorted(ticks):
        x = x_scale(value) if one.edges[0] <= value <= one.edges[-1] else None
        if x is None or x - last < _TICK_SPACE:
            continue
        last = x
        shown.append(element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=_BOTTOM, y2=_BOTTOM + 4, class_="tick"))
        shown.append(element("text", text, x=f"{x:.1f}", y=_BOTTOM + 18, text_anchor="middle"))
    return shown


def _mark(mark: Mark, x_scale: Scale) -> Html:
    x = x_scale(mark.value)
    if not mark.text:
        return element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=_TOP, y2=_BOTTOM, class_="at faint")
    right = x > (_LEFT + _RIGHT) / 2
    label = element(
        "text", mark.text, x=f"{x + (-5 if right else 5):.1f}", y=_TOP - 6, text_anchor="end" if right else "start"
    )
    return join(element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=_TOP - 14, y2=_BOTTOM, class_="at"), label)


def _legend() -> Html:
    entries = (
        element("span", element("i", style=f"background:var(--{colour})"), text)
        for text, colour in (("kept", "accent"), ("left out by filters", "out"))
    )
    return element("div", *entries, class_="legend")
