"""The results of metrics: tables of numbers, each with the marks that it has to reach, if there are some."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from daguerre.formatting import counted


@dataclass(frozen=True)
class Row:
    """One number of a metric."""

    name: str
    value: float
    """A share in [0, 1], or any number: see `share`."""
    must: float | None = None
    """Value that has to be reached, if there is such a mark."""
    aim: float | None = None
    """Value to aim at."""
    share: bool = True
    """A share in [0, 1], shown in per cent."""
    better: Literal["higher", "lower", ""] = "higher"
    """The direction of better values; empty where neither is better."""
    low: float | None = None
    high: float | None = None
    """Interval of the value, as `Result.note` says."""

    def document(self) -> dict[str, Any]:
        """As the files of results hold it; what is as usual is left out."""
        usual = {"share": True, "better": "higher", "low": None, "high": None}
        return {name: value for name, value in vars(self).items() if name not in usual or value != usual[name]}


def number(name: str, value: float, better: Literal["higher", "lower", ""], **more: Any) -> Row:
    """A row that is no share."""
    return Row(name, float(value), share=False, better=better, **more)


@dataclass(frozen=True)
class Result:
    """The rows of a metric over `count` images."""

    count: int
    rows: tuple[Row, ...]
    note: str = ""
    """What the numbers mean, for people."""
    made_with: Mapping[str, Any] = field(default_factory=dict)
    """What else the numbers depend on: networks and their digests, the reference, settings of the metric."""
    warning: str = ""
    """Why the numbers may mislead, if they may."""
    asked: int | None = None
    """Images that were asked for, where there were fewer."""

    def document(self) -> dict[str, Any]:
        """As evaluation.json and result.json hold it, for the report."""
        found: dict[str, Any] = {"count": self.count, "rows": [row.document() for row in self.rows]}
        found |= {name: value for name in ("note", "warning", "asked") if (value := getattr(self, name))}
        return found | ({"made_with": dict(self.made_with)} if self.made_with else {})

    def values(self) -> dict[str, float]:
        """Numbers by the names of their rows."""
        return {row.name: row.value for row in self.rows}

    def table(self, name: str) -> list[str]:
        """Lines for the terminal."""
        if any(row.must is not None for row in self.rows):
            aim = "aim" if any(row.aim is not None for row in self.rows) else ""
            head = f"{f'{name}: {self.count} images':19} {'measured':>6}{'must':>8}{aim:>8}".rstrip()
        else:
            head = f"{name}: {counted(self.count, 'image')}"
        head += f" (asked for: {self.asked:,})" if self.asked else ""
        return [head, *(_line(row) for row in self.rows), *([f"  warning: {self.warning}"] if self.warning else [])]


def _line(row: Row) -> str:
    if not row.share:
        interval = "" if row.low is None or row.high is None else f"   ({row.low:.6g} to {row.high:.6g})"
        return f"  {row.name:22}{row.value:>12.6g}{interval}"
    marks = ["" if mark is None else f"{100 * mark:.0f} %" for mark in (row.must, row.aim)]
    missed = row.must is not None and row.value < row.must
    return f"  {row.name:14}{100 * row.value:>8.1f} %{marks[0]:>8}{marks[1]:>8}{'  missed' if missed else ''}".rstrip()
