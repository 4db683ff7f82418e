"""Curves as inline SVG: axes with round ticks, lines, a legend, and the numbers for the hover script.

Knows nothing of runs: a chart is a title, a unit and series of points.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from daguerre.report.markup import Html, element, join

WIDTH, HEIGHT = 480, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 470, 10, 222
_POINTS = 400
_LOG_RATIO = 8.0


@dataclass(frozen=True)
class Series:
    """One line of a chart; xs ascend, ys are finite."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: str
    """A CSS colour; a variable of the page's style where light and dark differ."""
    faint: bool = False
    """Drawn thin and pale, behind the others: raw values of a smoothed line."""
    dots: bool = False
    """Mark every point: few values, far apart."""


@dataclass(frozen=True)
class Scale:
    """From values to the picture."""

    low: float
    high: float
    log: bool
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (self._warp(value) - self._warp(self.low)) / (self._warp(self.high) - self._warp(self.low))
        return self.start + share * (self.end - self.start)

    def _warp(self, value: float) -> float:
        return math.log10(value) if self.log else value


def chart(title: str, unit: str, series: Sequence[Series], *, log: bool = False, zero: bool = False) -> Html | None:
    """A figure over update steps, or None without points.

    `log` allows a logarithmic axis, taken where values are positive and span more than a factor of 8. `zero` starts a
    linear axis at 0.
    """
    series = [thin(one) for one in series if len(one.xs)]
    if not series:
        return None
    xs = [x for one in series for x in one.xs]
    ys = [y for one in series for y in one.ys]
    use_log = log and min(ys) > 0 and max(ys) / min(ys) > _LOG_RATIO
    x_scale = Scale(0.0, max(1.0, *xs), False, _LEFT, _RIGHT)
    y_low, y_high = _log_range(ys) if use_log else _linear_range(ys, zero)
    y_scale = Scale(y_low, y_high, use_log, _BOTTOM, _TOP)
    order = sorted(series, key=lambda one: not one.faint)
    drawing = element(
        "svg",
        _grid(x_scale, y_scale),
        *(_line(one, x_scale, y_scale) for one in order),
        element("line", class_="cursor", x1=0, x2=0, y1=_TOP, y2=_BOTTOM),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{title}: curve over steps",
    )
    caption = element("figcaption", element("b", title), element("span", unit + (", log scale" if use_log else "")))
    return element("figure", caption, _legend(series), drawing, _numbers(series, x_scale, y_scale), class_="chart")


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
    xs, ys = [series.xs[i] for i in chosen], [series.ys[i] for i in chosen]
    return Series(series.name, xs, ys, series.color, series.faint, series.dots)


def smooth(ys: Sequence[float]) -> list[float]:
    """Running mean over about a fiftieth of the line (5 values at least), without bias at its start."""
    keep = 1.0 - 1.0 / max(5.0, len(ys) / 50)
    total, weight, smoothed = 0.0, 0.0, []
    for y in ys:
        total, weight = keep * total + (1 - keep) * y, keep * weight + (1 - keep)
        smoothed.append(total / weight)
    return smoothed


def number_text(value: float) -> str:
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


def _linear_range(ys: list[float], zero: bool) -> tuple[float, float]:
    low, high = min(ys), max(ys)
    if zero and low >= 0:
        return 0.0, high * 1.08 or 1.0
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - pad, high + pad


def _log_range(ys: list[float]) -> tuple[float, float]:
    return min(ys) / 1.12, max(ys) * 1.12


def _grid(x_scale: Scale, y_scale: Scale) -> Html:
    parts = []
    for y in (log_ticks if y_scale.log else linear_ticks)(y_scale.low, y_scale.high):
        at = round(y_scale(y), 1)
        parts.append(element("line", x1=_LEFT, x2=_RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(element("text", _tick_text(y), x=_LEFT - 7, y=at + 4, text_anchor="end"))
    for x in linear_ticks(x_scale.low, x_scale.high):
        at = round(x_scale(x), 1)
        anchor = "end" if at > _RIGHT - 12 else "middle"
        parts.append(element("line", x1=at, x2=at, y1=_BOTTOM, y2=_BOTTOM + 4, class_="tick"))
        parts.append(element("text", _tick_text(x), x=at, y=_BOTTOM + 18, text_anchor=anchor))
    parts.append(element("line", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM, class_="tick"))
    return element("g", *parts, class_="axes")


def _tick_text(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= size * 0.9995 and abs(value) < 1e9:
            return f"{value / size:.4g}{unit}"
    return "0" if value == 0 else number_text(value)


def _line(series: Series, x_scale: Scale, y_scale: Scale) -> Html:
    points = [(round(x_scale(x), 1), round(y_scale(y), 1)) for x, y in zip(series.xs, series.ys, strict=True)]
    style = f"stroke:{series.color};fill:{series.color}"
    dots = (element("circle", cx=x, cy=y, r=2.4) for x, y in points) if series.dots or len(points) == 1 else ()
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    return element("g", element("path", d=path), *dots, style=style, class_="faint" if series.faint else "line")


def _legend(series: Sequence[Series]) -> Html | None:
    if len(series) < 2:
        return None
    keys = (
        element("span", element("i", style=f"background:{s.color}", class_="faint" if s.faint else None), s.name)
        for s in series
    )
    return element("div", *keys, class_="legend")


def _numbers(series: Sequence[Series], x_scale: Scale, y_scale: Scale) -> Html:
    """What the hover script reads: JSON, in which `<` cannot end the element."""
    document = {
        "x": [x_scale.low, x_scale.high, _LEFT, _RIGHT],
        "width": WIDTH,
        "series": [
            {"name": s.name, "color": s.color, "xs": list(s.xs), "ys": [float(f"{y:.6g}") for y in s.ys]}
            for s in series
        ],
    }
    text = json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
    return join(element("div", class_="tip"), element("script", Html(text), type="application/json"))
