"""Curves of a run's metrics in bounded memory: every value of a short run, and buckets of the values of a long one.

Reading the file is `followed.py`'s.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from daguerre.tracking.running_mean import RunningMean
from daguerre.tracking.sinks import RESERVED

BUCKETS = 2048
"""Most buckets of a curve, each with its mean and its extremes; a screen has fewer columns."""
SAMPLES, CLOCK, TRAINED = "samples", "time", "training"
"""Curves that every file has: samples seen, seconds since 1970, seconds in training steps."""


@dataclass
class Curve:
    """One number over updates: each value, or, beyond `BUCKETS` of them, buckets of `width` values."""

    width: int = 1
    columns: np.ndarray = field(default_factory=lambda: np.empty((6, 0)))
    """[step of the bucket's last value, mean, step of the least, the least, step of the most, the most] x buckets."""
    tail: np.ndarray = field(default_factory=lambda: np.empty((2, 0)))
    """[step, value] x values that fill no bucket yet; the newest value is always among them."""

    def extend(self, points_2N: np.ndarray) -> None:
        """Takes more values, [step, value] x n, in the order of the file."""
        points_2N = np.concatenate([self.tail, points_2N], axis=1)
        while True:
            room = (BUCKETS - self.columns.shape[1]) * self.width
            count = min(room, (points_2N.shape[1] - 1) // self.width * self.width)
            self._append(points_2N[:, :count])
            points_2N = points_2N[:, count:]
            if self.columns.shape[1] < BUCKETS:
                break
            self._halve()
        self.tail = points_2N

    def series(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and means."""
        return np.append(self.columns[0], self.tail[0]), np.append(self.columns[1], self.tail[1])

    def extremes(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of what is least and most in each bucket, by step: every value where buckets hold one."""
        if self.width == 1:
            return self.series()
        low, high = self.columns[2:4], self.columns[4:6]
        first = np.where(low[0] <= high[0], low, high)
        second = np.where(low[0] <= high[0], high, low)
        pairs = np.stack([first, second], axis=2).reshape(2, -1)
        return np.append(pairs[0], self.tail[0]), np.append(pairs[1], self.tail[1])

    def _append(self, points_2N: np.ndarray) -> None:
        if not points_2N.shape[1]:
            return
        steps, values = points_2N.reshape(2, -1, self.width)
        rows = np.arange(len(steps))
        low, high = values.argmin(axis=1), values.argmax(axis=1)
        new = [steps[:, -1], values.mean(axis=1), steps[rows, low], values[rows, low], steps[rows, high]]
        self.columns = np.concatenate([self.columns, [*new, values[rows, high]]], axis=1)

    def _halve(self) -> None:
        left, right = self.columns[:, ::2], self.columns[:, 1::2]
        low = np.where(left[3] <= right[3], left[2:4], right[2:4])
        high = np.where(left[5] >= right[5], left[4:6], right[4:6])
        self.columns = np.concatenate([right[:1], (left[1:2] + right[1:2]) / 2, low, high])
        self.width *= 2


@dataclass
class Curves:
    """The metrics of a run."""

    curves: dict[str, Curve] = field(default_factory=dict)
    newest: dict[str, tuple[int, Any]] = field(default_factory=dict)
    """Step and value of each metric's last line, finite or not."""
    finite: dict[str, float] = field(default_factory=dict)
    """The last finite value of each metric."""
    step: int = 0
    samples: int = 0
    """Of the last line."""
    first_time: str = ""
    last_time: str = ""
    loss: RunningMean = field(default_factory=RunningMean)
    """Of the training loss, as the terminal shows it."""
    training_seconds: float = 0.0
    """Time in training steps, from their measured mean; saves, sample images and pauses are not in it."""
    trained_to: int = 0
    """The step up to which this time is known."""

    def take(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Adds lines, in their order."""
        points: dict[str, list[tuple[float, float]]] = {}
        for line in lines:
            self._line(line, points)
        for name, found in points.items():
            self.curves.setdefault(name, Curve()).extend(np.array(found, dtype=np.float64).T)

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and finite values of one metric; of a long run, the means of buckets."""
        steps, values = self.curves[name].series() if name in self.curves else (_NONE, _NONE)
        return steps.tolist(), values.tolist()

    def extremes(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and finite values of one metric; of a long run, the least and the most of each bucket."""
        steps, values = self.curves[name].extremes() if name in self.curves else (_NONE, _NONE)
        return steps.tolist(), values.tolist()

    def names(self, start: str = "") -> list[str]:
        """Names of the metrics that begin so, sorted."""
        return sorted(name for name in self.newest if name.startswith(start))

    def last(self, name: str) -> float | None:
        """The latest finite value of a metric."""
        return self.finite.get(name)

    def _line(self, line: Mapping[str, Any], points: dict[str, list[tuple[float, float]]]) -> None:
        step = self.step = line["step"]
        self.samples = line["samples"]
        finite = {}
        for name, value in line.items():
            if name not in RESERVED:
                self.newest[name] = (step, value)
                if isinstance(value, int | float) and math.isfinite(value):
                    finite[name] = float(value)
        if "perf/step_time_seconds" in finite:
            self.training_seconds += (step - self.trained_to) * finite["perf/step_time_seconds"]
            self.trained_to = step
        self.finite |= finite
        self.loss.add(finite.get("learning/loss", math.nan))
        text = str(line.get("time", ""))
        self.first_time, self.last_time = self.first_time or text, text or self.last_time
        finite |= {SAMPLES: float(line["samples"]), TRAINED: self.training_seconds, **_clock(text)}
        for name, number in finite.items():
            points.setdefault(name, []).append((step, number))


_NONE = np.empty(0)


def _clock(text: str) -> dict[str, float]:
    try:
        return {CLOCK: datetime.fromisoformat(text).timestamp()}
    except ValueError:
        return {}
