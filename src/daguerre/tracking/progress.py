"""How far a `data` verb is: one line that keeps still on a terminal, a plain line now and then elsewhere.

On standard error, so that what a verb finds can be redirected.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TextIO

from daguerre.data import skipped
from daguerre.data.skipped import SkipReport
from daguerre.formatting import duration_text
from daguerre.tracking.console import CLEAR, moving

_REDRAW_SECONDS = 0.2
_PLAIN_SECONDS = 15.0
_SPEED_SECONDS = 1.0
"""How long is watched before a speed is said."""


@dataclass
class Counter:
    """Counts what is done of `total`; use it in a `with`, so that the line is put away whatever happens."""

    what: str
    """What is going on, such as `packing`."""
    total: int
    unit: str = "samples"
    done: int = 0
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.monotonic
    _started: float = 0.0
    _drawn_at: float = -math.inf
    _shown: bool = False
    _first: tuple[float, int] | None = None

    def __enter__(self) -> Counter:
        self._started = self.clock()
        self._drawn_at = self._started if not self._moving else -math.inf
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._write(CLEAR)

    def add(self, number: int) -> None:
        """`number` more are done."""
        self.done += number
        now = self.clock()
        if self._first is None:  # before that processes start, files are opened
            self._first = now, self.done
        if now - self._drawn_at < (_REDRAW_SECONDS if self._moving else _PLAIN_SECONDS):
            return
        self._drawn_at = now
        line = self._line(now)
        self._write(CLEAR + line[: self._columns() - 1] if self._moving else line + "\n")
        self._shown = self._moving

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self.clock() - self._started

    @property
    def _moving(self) -> bool:
        return moving(self.stream)

    def _line(self, now: float) -> str:
        parts = [f"{self.what}: {self.done:,} of {self.total:,} {self.unit}"]
        since, before = self._first or (now, self.done)
        if now - since > _SPEED_SECONDS and self.done > before:
            speed = (self.done - before) / (now - since)
            parts.append(f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.2g}/s")
            parts.append(f"{duration_text(max(0, self.total - self.done) / speed)} left")
        return "  ".join(parts)

    def _columns(self) -> int:
        try:
            columns = os.get_terminal_size(self.stream.fileno()).columns
        except OSError:
            columns = 80
        return columns or 80

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


def spoken(report: SkipReport) -> str:
    """What was left out, then what is only worth a note; empty if there is neither."""
    parts = []
    for title, kept in (("left out:", False), ("noted:", True)):
        chosen = {reason: entry for reason, entry in report.items() if bool(entry.get("kept")) is kept}
        if chosen:
            parts.append(f"{title}\n{skipped.table(chosen)}")
    return "\n".join(parts)
