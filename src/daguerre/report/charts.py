"""Curves of a run, from the names in its metrics. Drawn by report/svg.py here, and by the page of a live run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from daguerre.report.html import Html
from daguerre.report.run import Run
from daguerre.report.svg import Series, chart, smooth

MAIN, SECOND, THIRD = "var(--accent)", "var(--second)", "var(--high)"
_QUARTERS = ("cleanest quarter", "second", "third", "noisiest quarter")


@dataclass(frozen=True)
class Line:
    """One metric in a chart."""

    metric: str
    label: str
    color: str
    dots: bool = False
    """Few values, far apart."""
    smoothed: bool = False
    """A running mean is drawn."""
    raw: bool = False
    """Every value is drawn, pale, behind the mean."""


@dataclass(frozen=True)
class Chart:
    """Metrics that belong together."""

    title: str
    unit: str
    lines: list[Line]
    log: bool = False
    """The vertical axis may be logarithmic."""
    zero: bool = False
    """The vertical axis begins at 0."""
    factor: float = 1.0
    """Of the values in this unit."""


def charts(run: Run) -> list[Html]:
    """Every chart that the run has numbers for."""
    drawn = (chart(one.title, one.unit, _series(run, one), log=one.log, zero=one.zero) for one in definitions(run))
    return [one for one in drawn if one is not None]


def definitions(run: Run) -> list[Chart]:
    """The charts of a run, with those lines for which it has numbers."""
    levels = sorted(run.curves.names("validation/loss_level_"), key=_index)
    quartiles = {f"learning/loss_quartile_{i}": label for i, label in enumerate(_QUARTERS)}
    evaluations = run.curves.names("evaluation/")
    tables = {name.split("/")[1] for name in evaluations}
    labels = {name: " ".join(name.split("/")[1 + (len(tables) == 1) :]) for name in evaluations}
    found = [
        Chart(
            "Loss",
            "mean over samples",
            [
                Line("learning/loss", "smoothed", MAIN, smoothed=True, raw=True),
                Line("validation/loss", "validation", SECOND, dots=True),
                Line("validation/loss_raw", "validation, raw weights", THIRD, dots=True),
            ],
            log=True,
        ),
        Chart(
            "Validation loss by noise level",
            "held-out samples",
            _ordered({name: _place(i, len(levels)) for i, name in enumerate(levels)}, dots=True),
            log=True,
        ),
        Chart("Training loss by noise quartile", "smoothed", _ordered(quartiles, smoothed=True), log=True),
        Chart("Evaluation", "per cent", _ordered(labels, dots=True), factor=100),
        Chart(
            "Gradient norm",
            "before clipping",
            [Line("learning/gradient_norm", "smoothed", MAIN, smoothed=True, raw=True)],
            log=True,
        ),
        Chart("Learning rate", "per update", [Line("learning/current_learning_rate", "rate", MAIN)], zero=True),
        Chart("Speed", "samples per second", [Line("perf/samples_per_second", "samples/s", MAIN)], zero=True),
        Chart(
            "Time of a step",
            "seconds",
            [
                Line("perf/step_time_seconds", "whole step", MAIN),
                Line("perf/data_wait_seconds", "waiting for data", SECOND),
            ],
            zero=True,
        ),
    ]
    return [one for one in (_with_numbers(run, one) for one in found) if _says_something(run, one)]


def _with_numbers(run: Run, one: Chart) -> Chart:
    lines = [line for line in one.lines if line.metric in run.curves.curves]
    return replace(one, lines=lines)


def _says_something(run: Run, one: Chart) -> bool:
    if one.title == "Training loss by noise quartile":
        # Of an objective without noise all samples are in one quarter: its curve would be the loss once more.
        return len(one.lines) > 1
    if one.title == "Evaluation":  # of one evaluation there is a table
        return any(len(run.curves.series(line.metric)[0]) > 1 for line in one.lines)
    return bool(one.lines)


def _series(run: Run, one: Chart) -> list[Series]:
    drawn = []
    for line in one.lines:
        steps, values = run.curves.series(line.metric)
        if line.raw:
            drawn.append(Series("each interval", *run.curves.extremes(line.metric), line.color, faint=True))
        values = smooth(values) if line.smoothed else [one.factor * value for value in values]
        drawn.append(Series(line.label, steps, values, line.color, dots=line.dots))
    return drawn


def _ordered(labels: Mapping[str, str], *, dots: bool = False, smoothed: bool = False) -> list[Line]:
    """Lines that have an order, by metric and label, in colours between two ends."""
    return [
        Line(name, label, between(i, len(labels)), dots=dots, smoothed=smoothed)
        for i, (name, label) in enumerate(labels.items())
    ]


def between(number: int, count: int) -> str:
    """A colour between two ends, for one of several lines that have an order."""
    return f"color-mix(in oklab, var(--high) {round(100 * number / max(1, count - 1))}%, var(--low))"


def _index(name: str) -> int:
    digits = name.rsplit("_", 1)[1]
    return int(digits) if digits.isdecimal() else -1


def _place(i: int, count: int) -> str:
    return {0: "cleanest", count - 1: "noisiest"}.get(i, str(i + 1))
