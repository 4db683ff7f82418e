"""Charts as inline SVG: curves over steps, with the numbers for the hover script, and histograms. One layout for both.

Knows nothing of runs and data sets: a chart is a title, a unit, and series of points or counts between edges.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from daguerre.report.html import Html, element, join, json_script

WIDTH, HEIGHT = 480, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 470, 18, 222
_POINTS = 400
_LOG_RATIO = 8.0
_TICK_SPACE = 46

Ticks = Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Series:
    """One line of a chart, in the order of its points; ys are finite."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: str
    """A CSS colour; a variable of the page's style where light and dark differ."""
    faint: bool = False
    """Thin and pale, behind the others: raw values of a smoothed line."""
    dots: bool = False
    """Mark every point: few values, far apart."""
    labels: Sequence[str] = ()
    """A short text next to each point."""


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
    """Unit of the horizontal axis, such as `px`."""
    edges: Sequence[float]
    """[n + 1], ascending."""
    kept: Sequence[int]
    """[n]."""
    left_out: Sequence[int] = ()
    """[n] more, which filters reject; empty if there are none."""
    log: bool = False
    """Logarithmic axis."""
    marks: Sequence[Mark] = ()
    ticks: Ticks = ()
    """Labels of the axis, if not at round numbers."""
    note: str = ""
    """Stands below."""


@dataclass(frozen=True)
class Scale:
    """From values to places in the chart."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """Round values on the scale, with their labels."""
        values = log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)
        return [(value, _tick_text(value)) for value in values]


def chart(
    title: str,
    unit: str,
    series: Sequence[Series],
    *,
    log: bool = False,
    zero: bool = False,
    over: str = "step",
) -> Html | None:
    """Curves over update steps from 0 on, or over another number that is named; None without points.

    `log` allows a logarithmic axis, taken where values are positive and span more than a factor of 8. `zero` starts a
    linear axis at 0.
    """
    series = [thin(one) for one in series if len(one.xs)]
    if not series:
        return None
    ys = [y for one in series for y in one.ys]
    use_log = log and min(ys) > 0 and max(ys) / min(ys) > _LOG_RATIO
    xs = [x for one in series for x in one.xs]
    x_range = (0.0, max(1.0, *xs)) if over == "step" else _range(xs, False, False)
    x_scale = Scale(*x_range, _LEFT, _RIGHT)
    y_scale = Scale(*_range(ys, use_log, zero), _BOTTOM, _TOP, use_log)
    drawing = [
        *(_line(one, x_scale, y_scale) for one in sorted(series, key=lambda one: not one.faint)),
        element("line", class_="cursor", x1=0, x2=0, y1=_TOP, y2=_BOTTOM),
    ]
    keys = [(one.name, one.color, "faint" if one.faint else None) for one in series] if len(series) > 1 else []
    subtitle = f"{unit}, log scale" if use_log else unit
    axes = _axes(x_scale, x_scale.ticks(), y_scale, y_scale.ticks())
    numbers = _numbers(series, x_scale, over)
    return _figure(title, subtitle, f"curve over {over}", keys, [axes, *drawing], numbers, "chart")


def histogram(one: Histogram) -> Html:
    """Bars between edges, kept and left out in two shades; they say their range and counts when pointed at."""
    left_out = one.left_out or [0] * len(one.kept)
    most = max((k + out for k, out in zip(one.kept, left_out, strict=True)), default=0)
    x_scale = Scale(one.edges[0], one.edges[-1], _LEFT, _RIGHT, one.log)
    y_scale = Scale(0.0, max(1.0, most * 1.04), _BOTTOM, _TOP)
    x_ticks = sorted(one.ticks) or [
        (value, format_number(value)) for value in linear_ticks(x_scale.low, x_scale.high, 6)
    ]
    counts = [count for count in linear_ticks(0.0, max(1.0, most), 4) if count == int(count)]
    drawing = [
        _axes(x_scale, x_ticks, y_scale, [(count, _tick_text(count)) for count in counts]),
        *(_mark(mark, x_scale) for mark in one.marks if x_scale.low <= mark.value <= x_scale.high),
        *(_bar(one, i, left_out[i], x_scale, y_scale) for i in range(len(one.kept))),
    ]
    keys = [("kept", "var(--accent)", None), ("left out by filters", "var(--out)", None)] if any(left_out) else []
    note = element("p", one.note, class_="note") if one.note else None
    return _figure(one.title, one.unit, "histogram", keys, drawing, note, "chart bars")


def _figure(
    title: str,
    unit: str,
    kind: str,
    keys: Sequence[tuple[str, str, str | None]],
    drawing: Sequence[Html | None],
    below: Html | None,
    class_: str,
) -> Html:
    """The frame of every chart; `keys` are the legend: name, colour, class."""
    caption = element("figcaption", element("b", title), element("span", unit))
    legend = (element("span", element("i", style=f"background:{c}", class_=of), name) for name, c, of in keys)
    label = f"{title}: {kind}"
    svg = element("svg", *drawing, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)
    return element(
        "figure", caption, element("div", *legend, class_="legend") if keys else None, svg, below, class_=class_
    )


def _axes(x_scale: Scale, x_ticks: Ticks, y_scale: Scale, y_ticks: Ticks) -> Html:
    """Grid lines with labels, and as many labels below as have room."""
    parts = []
    for value, text in y_ticks:
        y = round(y_scale(value), 1)
        parts.append(element("line", x1=_LEFT, x2=_RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(element("text", text, x=_LEFT - 7, y=y, dy="0.32em", text_anchor="end"))
    last = -math.inf
    for value, text in x_ticks:
        if not x_scale.low <= value <= x_scale.high or (x := round(x_scale(value), 1)) - last < _TICK_SPACE:
            continue
        last, anchor = x, "end" if x > _RIGHT - 12 else "middle"
        parts.append(element("line", x1=x, x2=x, y1=_BOTTOM, y2=_BOTTOM + 4, class_="tick"))
        parts.append(element("text", text, x=x, y=_BOTTOM + 18, text_anchor=anchor))
    parts.append(element("line", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM, class_="tick"))
    return element("g", *parts, class_="axes")


def thin(series: Series) -> Series:
    """At most `_POINTS` points: the lowest and the highest of each stretch stay, so that no spike is lost."""
    count = len(series.xs)
    if count <= _POINTS:
        return series
    kept = {0, count - 1}
    stretches = _POINTS // 2 - 1
    for i in range(stretches):
        stretch = range(i * count // stretches, (i + 1) * count // stretches)
        kept |= {min(stretch, key=series.ys.__getitem__), max(stretch, key=series.ys.__getitem__)}
    chosen = sorted(kept)
    return replace(series, xs=[series.xs[i] for i in chosen], ys=[series.ys[i] for i in chosen])


def smooth(ys: Sequence[float]) -> list[float]:
    """Running mean over about a fiftieth of the line (5 values at least), without bias at its start."""
    keep = 1.0 - 1.0 / max(5.0, len(ys) / 50)
    total, weight, smoothed = 0.0, 0.0, []
    for y in ys:
        total, weight = keep * total + (1 - keep) * y, keep * weight + (1 - keep)
        smoothed.append(total / weight)
    return smoothed


def format_number(value: float) -> str:
    """Four significant digits, without exponent where that reads well."""
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-4 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten inside [low, high], about `count` of them."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside [low, high], with 2 and 5 times them where there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    marks = (1, 2, 5) if last - first <= 3 else (1,)
    return [m * 10.0**e for e in range(first, last + 1) for m in marks if low * 0.999 <= m * 10.0**e <= high * 1.001]


def _range(ys: list[float], log: bool, zero: bool) -> tuple[float, float]:
    """Ends of the vertical axis, with some room."""
    low, high = min(ys), max(ys)
    if log:
        return low / 1.12, high * 1.12
    if zero and low >= 0:
        return 0.0, high * 1.08 or 1.0
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - pad, high + pad


def _tick_text(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= size * 0.9995 and abs(value) < 1e9:
            return f"{value / size:.4g}{unit}"
    return "0" if value == 0 else format_number(value)


def _line(series: Series, x_scale: Scale, y_scale: Scale) -> Html:
    points = [(round(x_scale(x), 1), round(y_scale(y), 1)) for x, y in zip(series.xs, series.ys, strict=True)]
    style = f"stroke:{series.color};fill:{series.color}"
    dots = (element("circle", cx=x, cy=y, r=2.4) for x, y in points) if series.dots or len(points) == 1 else ()
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    labels = (element("text", label, x=x + 5, y=y - 5) for (x, y), label in zip(points, series.labels, strict=False))
    return element(
        "g", element("path", d=path), *dots, *labels, style=style, class_="faint" if series.faint else "line"
    )


def _numbers(series: Sequence[Series], x_scale: Scale, over: str) -> Html:
    """JSON for the hover script; points in the order of their xs."""
    points = [sorted(zip(one.xs, one.ys, strict=True)) for one in series]
    document = {
        "x": [x_scale.low, x_scale.high, _LEFT, _RIGHT],
        "width": WIDTH,
        "over": over,
        "series": [
            {"name": s.name, "color": s.color, "xs": [x for x, _ in each], "ys": [float(f"{y:.6g}") for _, y in each]}
            for s, each in zip(series, points, strict=True)
        ],
    }
    return join(element("div", class_="tip"), json_script(document))


def _bar(one: Histogram, i: int, left_out: int, x_scale: Scale, y_scale: Scale) -> Html | None:
    kept, low, high = one.kept[i], one.edges[i], one.edges[i + 1]
    if not kept + left_out:
        return None
    start, end = x_scale(low), x_scale(high)
    gap = 1.0 if end - start > 4 else 0.2
    said = f"{format_number(low)} to {format_number(high)}: {kept:,}" + (
        f", and {left_out:,} left out" if left_out else ""
    )
    parts = []
    for count, below, kind in ((kept, 0, "kept"), (left_out, kept, "out")):
        if count:
            top = y_scale(below + count)
            height = max(0.8, y_scale(below) - top)
            x, width = f"{start + gap / 2:.1f}", f"{max(0.6, end - start - gap):.1f}"
            parts.append(element("rect", x=x, y=f"{top:.1f}", width=width, height=f"{height:.1f}", class_=kind))
    hit = element("rect", x=f"{start:.1f}", y=_TOP, width=f"{end - start:.1f}", height=_BOTTOM - _TOP, class_="hit")
    return element("g", element("title", said), hit, *parts)


def _mark(mark: Mark, x_scale: Scale) -> Html:
    x = round(x_scale(mark.value), 1)
    if not mark.text:
        return element("line", x1=x, x2=x, y1=_TOP, y2=_BOTTOM, class_="at faint")
    offset, anchor = (-5, "end") if x > (_LEFT + _RIGHT) / 2 else (5, "start")
    label = element("text", mark.text, x=x + offset, y=_TOP - 6, text_anchor=anchor)
    return join(element("line", x1=x, x2=x, y1=_TOP - 14, y2=_BOTTOM, class_="at"), label)
