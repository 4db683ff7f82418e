"""Curves of a run, from the names in its metrics. Drawn by report/svg.py."""

from collections.abc import Mapping

from daguerre.report.html import Html
from daguerre.report.run import Run
from daguerre.report.svg import Series, chart, smooth

MAIN, SECOND = "var(--accent)", "var(--second)"
_QUARTERS = ("cleanest quarter", "second", "third", "noisiest quarter")


def charts(run: Run) -> list[Html]:
    """Every chart that the run has numbers for."""
    validation = _plain(run, "validation/loss", "validation", SECOND, dots=True)
    levels = sorted(_names(run, "validation/loss_level_"), key=_index)
    quartiles = {f"learning/loss_quartile_{i}": label for i, label in enumerate(_QUARTERS)}
    rate = _plain(run, "learning/current_learning_rate", "rate", MAIN)
    speed = _plain(run, "perf/samples_per_second", "samples/s", MAIN)
    step = _plain(run, "perf/step_time_seconds", "whole step", MAIN)
    wait = _plain(run, "perf/data_wait_seconds", "waiting for data", SECOND)
    tables = {name.split("/")[1] for name in _names(run, "evaluation/")}
    labels = {name: " ".join(name.split("/")[1 + (len(tables) == 1) :]) for name in _names(run, "evaluation/")}
    shares = _ordered(run, labels, dots=True, factor=100)
    # Of an objective without noise all samples are in one quarter: its curve would be the loss once more.
    noisy = [one for one in _ordered(run, quartiles, smoothed=True) if one.xs]
    found = [
        chart("Loss", "mean over samples", [*_smoothed(run, "learning/loss"), validation], log=True),
        chart(
            "Validation loss by noise level",
            "held-out samples",
            _ordered(run, {name: _place(i, len(levels)) for i, name in enumerate(levels)}, dots=True),
            log=True,
        ),
        chart("Training loss by noise quartile", "smoothed", noisy, log=True) if len(noisy) > 1 else None,
        chart("Evaluation", "per cent", shares) if any(len(one.xs) > 1 for one in shares) else None,
        chart("Gradient norm", "before clipping", _smoothed(run, "learning/gradient_norm"), log=True),
        chart("Learning rate", "per update", [rate], zero=True),
        chart("Speed", "samples per second", [speed], zero=True),
        chart("Time of a step", "seconds", [step, wait], zero=True),
    ]
    return [one for one in found if one is not None]


def _names(run: Run, start: str) -> list[str]:
    return sorted({name for line in run.lines for name in line if name.startswith(start)})


def _plain(run: Run, name: str, label: str, color: str, dots: bool = False) -> Series:
    return Series(label, *run.series(name), color, dots=dots)


def _smoothed(run: Run, name: str) -> list[Series]:
    steps, values = run.series(name)
    return [
        Series("each interval", steps, values, MAIN, faint=True),
        Series("smoothed", steps, smooth(values), MAIN),
    ]


def _ordered(
    run: Run, labels: Mapping[str, str], *, dots: bool = False, smoothed: bool = False, factor: float = 1
) -> list[Series]:
    """Series that have an order, by metric and label, in colours between two ends."""
    found = []
    for i, (name, label) in enumerate(labels.items()):
        steps, values = run.series(name)
        values = smooth(values) if smoothed else [factor * value for value in values]
        share = round(100 * i / max(1, len(labels) - 1))
        color = f"color-mix(in oklab, var(--high) {share}%, var(--low))"
        found.append(Series(label, steps, values, color, dots=dots))
    return found


def _index(name: str) -> int:
    digits = name.rsplit("_", 1)[1]
    return int(digits) if digits.isdecimal() else -1


def _place(i: int, count: int) -> str:
    return {0: "cleanest", count - 1: "noisiest"}.get(i, str(i + 1))
