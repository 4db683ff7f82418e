"""The terminal and the report show one loss."""

from __future__ import annotations

import io
import math

import pytest

from daguerre.report import facts
from daguerre.report.run import Run
from daguerre.report.svg import format_number
from daguerre.tracking.console import Progress
from daguerre.tracking.curves import Curves
from daguerre.tracking.running_mean import RunningMean

LOSSES = [1.0, 0.5, math.nan, 0.25, 0.125, 0.5]


def test_each_value_counts_a_twentieth_less_than_the_next():
    kept = [value for value in LOSSES if math.isfinite(value)]
    weights = [0.95**i for i in reversed(range(len(kept)))]
    expected = sum(w * v for w, v in zip(weights, kept, strict=True)) / sum(weights)
    assert RunningMean(LOSSES).value == pytest.approx(expected, rel=1e-12)
    assert RunningMean().value is None
    assert RunningMean([math.nan]).value is None


def test_terminal_and_report_show_one_number(tmp_path):
    stream = io.StringIO()
    terminal = Progress(6, stream, plain_seconds=0)
    for step, loss in enumerate(LOSSES, 1):
        terminal.update(step, step, loss)
    shown = stream.getvalue().splitlines()[-1].partition("loss ")[2].split()[0]
    lines = [{"step": i, "samples": i, "learning/loss": loss} for i, loss in enumerate(LOSSES, 1)]
    curves = Curves()
    curves.take(lines)
    run = Run(tmp_path, "saved", {}, {}, "", {}, curves, {}, {}, [], {}, {}, [], [], [])
    page = str(facts.facts(run))
    assert format_number(RunningMean(LOSSES).value) in page
    assert f"{RunningMean(LOSSES).value:.4f}" == shown
    assert "running mean" in page
