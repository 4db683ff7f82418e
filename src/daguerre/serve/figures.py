"""Curves for the browser: what the report draws, and numbers that it has no room for, as JSON."""

from dataclasses import asdict
from typing import Any

import numpy as np

from daguerre.report.charts import MAIN, Chart, Line, definitions
from daguerre.report.html import Html, element
from daguerre.report.run import Run
from daguerre.tracking.curves import CLOCK, SAMPLES, TRAINED, Curve, Curves

_DIGITS = 6


def charts(run: Run) -> list[Chart]:
    """The report's charts, the memory of the device, then each other number that changes."""
    found = definitions(run)
    if "memory/peak_bytes" in run.curves.curves:
        lines = [Line("memory/peak_bytes", "peak", MAIN)]
        found.append(Chart("Memory of the device", "GiB", lines, zero=True, factor=2.0**-30))
    drawn = {line.metric for one in found for line in one.lines}
    rest = [name for name in run.curves.names() if name not in drawn and _changes(run.curves.curves.get(name))]
    return found + [Chart(name, "", [Line(name, name.rpartition("/")[2], MAIN)]) for name in rest]


def _changes(curve: Curve | None) -> bool:
    return curve is not None and len(np.unique(curve.series()[1])) > 1


def document(run: Run, version: str, after: float | None = None) -> dict[str, Any]:
    """Charts and numbers; of the numbers only those `after` an update, if that is asked for."""
    found = charts(run)
    names = {line.metric for one in found for line in one.lines}
    return {
        "version": version,
        "step": run.curves.step,
        "charts": [asdict(one) for one in found],
        "clock": clock(run.curves, after),
        "metrics": {name: numbers(run.curves.curves[name], after) for name in sorted(names)},
    }


def tools(smooth: int, *first: Html) -> Html:
    """The tools above charts, for charts.js: `first`, then those of all pages. The slider begins at `smooth` of 100."""
    return element(
        "div",
        *first,
        element("label", "smooth ", element("input", type="range", id="smooth", min=0, max=100, value=smooth, step=1)),
        element("label", element("input", type="checkbox", id="log-axis"), " log axis"),
        element("label", element("input", type="checkbox", id="outliers"), " without outliers"),
        element("button", "Whole range", type="button", id="whole", hidden=True),
        class_="tools",
    )


def clock(curves: Curves, after: float | None = None) -> dict[str, list[float]]:
    """Samples, seconds of training and seconds on the clock at some updates, to put curves over them."""
    found: dict[str, list[float]] = {}
    for name in (SAMPLES, TRAINED, CLOCK):
        if name in curves.curves:
            columns, tail = curves.curves[name].columns, curves.curves[name].tail
            steps, values = np.append(columns[0], tail[0]), np.append(columns[5], tail[1])  # they only grow
            kept = slice(None) if after is None else steps > after
            found |= {f"{name}_steps": steps[kept].tolist(), name: values[kept].tolist()}
    return found


def numbers(curve: Curve, after: float | None = None) -> dict[str, list[float]]:
    """`x` and `y`, and where these are means, `raw_x` and `raw_y` with the extremes."""
    found = dict(zip(("x", "y"), _points(*curve.series(), after), strict=True))
    if curve.width > 1:
        found |= dict(zip(("raw_x", "raw_y"), _points(*curve.extremes(), after), strict=True))
    return found


def _points(steps: np.ndarray, values: np.ndarray, after: float | None) -> tuple[list[float], list[float]]:
    if after is not None:
        steps, values = steps[steps > after], values[steps > after]
    return steps.astype(np.int64).tolist(), _rounded(values).tolist()


def _rounded(values: np.ndarray) -> np.ndarray:
    """With as many digits as a screen can show: the text of a number is a third as long."""
    size = np.where(values == 0, 1.0, np.abs(values))
    power = np.clip(_DIGITS - 1 - np.floor(np.log10(size)), -300, 300)
    scale = 10.0 ** np.abs(power)
    return np.where(power >= 0, np.round(values * scale) / scale, np.round(values / scale) * scale)
