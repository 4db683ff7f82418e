"""Progress of commands other than training: a status line on standard error, so that results can be redirected."""

import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from daguerre.data import skipped
from daguerre.data.skipped import SkipReport
from daguerre.formatting import format_duration
from daguerre.tracking.console import StatusLine

_PLAIN_SECONDS = 15.0
_SPEED_SECONDS = 1.0
"""Time that is watched before a speed is shown."""


class Counter(StatusLine):
    """Counts what is done of `total`; use it in a `with`."""

    def __init__(
        self,
        what: str,
        total: int,
        unit: str = "samples",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`what` goes on, such as `packing`."""
        super().__init__(stream or sys.stderr, _PLAIN_SECONDS, clock=clock)
        self.what, self.total, self.unit, self.done = what, total, unit, 0
        self._started = clock()
        self._first: tuple[float, int] | None = None

    def __enter__(self) -> Self:
        self._started = self.clock()
        if not self.moves:
            self.due()
        return self

    def add(self, number: int) -> None:
        self.done += number
        now = self.clock()
        if self._first is None:  # before that processes start, files are opened
            self._first = now, self.done
        if self.due():
            self.show(self._fields(now), ("speed", "left"), self.done / max(1, self.total))

    @property
    def seconds(self) -> float:
        return self.clock() - self._started

    def _fields(self, now: float) -> dict[str, str]:
        fields = {"done": f"{self.what}: {self.done:,} of {self.total:,} {self.unit}"}
        since, before = self._first or (now, self.done)
        if now - since > _SPEED_SECONDS and self.done > before:
            speed = (self.done - before) / (now - since)
            fields["speed"] = f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.2g}/s"
            fields["left"] = f"{format_duration(max(0, self.total - self.done) / speed)} left"
        return fields


class Stages(StatusLine):
    """Shows each stage of `daguerre plan` as it begins; use it in a `with`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream or sys.stderr, 0.0)

    def say(self, stage: str) -> None:
        self.show({"stage": f"planning: {stage}{' ...' if self.moves else ''}"})


def skip_summary(report: SkipReport) -> str:
    """Samples left out by reason, then those only noted; empty if there is neither."""
    parts = []
    for title, kept in (("left out:", False), ("noted:", True)):
        chosen = {reason: entry for reason, entry in report.items() if bool(entry.get("kept")) is kept}
        if chosen:
            parts.append(f"{title}\n{skipped.table(chosen)}")
    return "\n".join(parts)
