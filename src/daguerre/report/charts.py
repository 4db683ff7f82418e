"""Which curves a run has, from the names in its metrics. Drawing is report/svg_curves.py's."""

from __future__ import annotations

from collections.abc import Sequence

from daguerre.report.markup import Html
from daguerre.report.run import Run
from daguerre.report.svg_curves import Series, chart, smooth

MAIN, SECOND = "var(--accent)", "var(--second)"


def charts(run: Run) -> list[Html]:
    """Every chart that the run has numbers for."""
    found = [
        _loss(run),
        _levels(run),
        _quartiles(run),
        _shares(run),
        chart("Gradient norm", "before clipping", _smoothed(run, "learning/gradient_norm"), log=True),
        chart("Learning rate", "per update", [_plain(run, "learning/current_learning_rate", "rate", MAIN)], zero=True),
        chart("Speed", "samples per second", [_plain(run, "perf/samples_per_second", "samples/s", MAIN)], zero=True),
        _step_time(run),
    ]
    return [one for one in found if one is not None]


def _loss(run: Run) -> Html | None:
    series = _smoothed(run, "learning/loss")
    held_out = _plain(run, "validation/loss", "validation", SECOND, dots=True)
    return chart("Loss", "mean over samples", [*series, held_out], log=True)


def _levels(run: Run) -> Html | None:
    names = sorted({n for line in run.lines for n in line if n.startswith("validation/loss_level_")}, key=_index)
    series = [
        _plain(run, name, _place(i, len(names)), _ordered(i, len(names)), dots=True) for i, name in enumerate(names)
    ]
    return chart("Validation loss by noise level", "held-out samples", series, log=True)


def _quartiles(run: Run) -> Html | None:
    names = [f"learning/loss_quartile_{i}" for i in range(4)]
    labels = ["cleanest quarter", "second", "third", "noisiest quarter"]
    series = []
    for i, name in enumerate(names):
        steps, values = run.series(name)
        series.append(Series(labels[i], steps, smooth(values), _ordered(i, len(names))))
    return chart("Training loss by noise quartile", "smoothed", series, log=True)


def _shares(run: Run) -> Html | None:
    names = sorted({n for line in run.lines for n in line if n.startswith("evaluation/")})
    series = []
    for i, name in enumerate(names):
        steps, values = run.series(name)
        label = name.rsplit("/", 1)[1]
        series.append(Series(label, steps, [100 * v for v in values], _ordered(i, len(names)), dots=True))
    several = any(len(one.xs) > 1 for one in series)
    return chart("Evaluation", "per cent", series) if several else None


def _step_time(run: Run) -> Html | None:
    step = _plain(run, "perf/step_time_seconds", "whole step", MAIN)
    wait = _plain(run, "perf/data_wait_seconds", "waiting for data", SECOND)
    return chart("Time of a step", "seconds", [step, wait], zero=True)


def _smoothed(run: Run, name: str) -> Sequence[Series]:
    steps, values = run.series(name)
    raw = Series("each interval", steps, values, MAIN, faint=True)
    return [raw, Series("smoothed", steps, smooth(values), MAIN)]


def _plain(run: Run, name: str, label: str, color: str, dots: bool = False) -> Series:
    steps, values = run.series(name)
    return Series(label, steps, values, color, dots=dots)


def _index(name: str) -> int:
    digits = name.rsplit("_", 1)[1]
    return int(digits) if digits.isdecimal() else -1


def _place(i: int, count: int) -> str:
    return {0: "cleanest", count - 1: "noisiest"}.get(i, str(i + 1))


def _ordered(i: int, count: int) -> str:
    """Colours between two ends, for series that have an order."""
    share = round(100 * i / max(1, count - 1))
    return f"color-mix(in oklab, var(--high) {share}%, var(--low))"
