"""The results of a metric: shares, with the marks that they have to reach.

A file of this folder with this function is a metric:

    def evaluate(settings: SourceSettings, draw: Draw, redraw: Redraw | None) -> dict[str, Result]

where `settings` are those of the source that names the metric, and `draw` yields one image [H, W, 3] uint8 a prompt. A
model that reads control images has `redraw` in its place. The results are tables by their names; the first has the
metric's own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Draw = Callable[[Sequence[str]], Iterable[np.ndarray]]
"""Images of prompts, in their order, by the weights that are evaluated."""
Redraw = Callable[[Sequence[str], Sequence[np.ndarray]], Iterable[np.ndarray]]
"""The same by a model that reads control images, which are computed from images [H, W, 3] uint8, one a prompt."""


@dataclass(frozen=True)
class Row:
    """One number of a metric."""

    name: str
    value: float
    """A share in [0, 1]; higher is better."""
    must: float | None = None
    """Least value, if there is such a mark."""
    aim: float | None = None
    """Value to aim at."""


@dataclass(frozen=True)
class Result:
    """The rows of a metric over `count` images."""

    count: int
    rows: tuple[Row, ...]

    def document(self) -> dict[str, Any]:
        """As evaluation.json holds it, for the report."""
        return {"count": self.count, "rows": [vars(row) for row in self.rows]}

    def shares(self) -> dict[str, float]:
        return {row.name: row.value for row in self.rows}

    def table(self, name: str) -> list[str]:
        """Lines for the terminal."""
        head = f"{f'{name}: {self.count} images':20}{'measured':>6}{'must':>8}{'aim':>8}"
        return [head, *(_line(row) for row in self.rows)]


def _line(row: Row) -> str:
    marks = ["" if mark is None else f"{100 * mark:.0f} %" for mark in (row.must, row.aim)]
    missed = row.must is not None and row.value < row.must
    return f"  {row.name:14}{100 * row.value:>8.1f} %{marks[0]:>8}{marks[1]:>8}{'  missed' if missed else ''}".rstrip()
