"""The terminal of a run: one line that stays in place at the bottom, plain lines in a pipe or a log file.

Holds the line, the messages above it and the estimate of the time left. Measures nothing of the run but the clock.
"""

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from daguerre.formatting import fitted, format_duration
from daguerre.tracking.running_mean import RunningMean

_REDRAW_SECONDS = 0.1
_INTERVAL_SECONDS = 0.5
_BAR_COLUMNS = 24


class StatusLine:
    """A line that is redrawn in place if `stream` is a terminal that can move its cursor, by rich; else plain lines.

    Use it in a `with`, so that the line is cleared whatever happens. NO_COLOR turns styles off.
    """

    def __init__(
        self,
        stream: TextIO,
        plain_seconds: float,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.moves = stream.isatty() and environ.get("TERM") not in (None, "", "dumb")
        self._console = Console(
            file=stream,
            force_terminal=self.moves,
            force_interactive=self.moves,
            force_jupyter=False,
            color_system=None if environ.get("NO_COLOR") else "auto",
            _environ=environ,
        )
        self._live: Live | None = None
        self._seconds = _REDRAW_SECONDS if self.moves else plain_seconds
        self.clock = clock
        self._shown_at = -math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def message(self, text: str) -> None:
        """Prints `text` for good, above the line."""
        self._print(text)

    def _print(self, text: str) -> None:
        whole = _printable(text)
        self._console.out(fitted(whole, self._console.width - 1) if self.moves else whole, highlight=False)

    def due(self, last: bool = False) -> bool:
        """True if it is time to show the line again: 10 times a second on a terminal, else each `plain_seconds`."""
        now = self.clock()
        if not last and now - self._shown_at < self._seconds:
            return False
        self._shown_at = now
        return True

    def show(self, fields: Mapping[str, str], spare: Sequence[str] = (), done: float | None = None) -> None:
        """Shows the line. On a terminal with a bar for the share `done`; where columns are few the bar goes first,
        then the fields named in `spare`, in that order."""
        if not self.moves:
            self._print("  ".join(fields.values()))
            return
        room = self._console.width - 1  # a full last column wraps on some terminals
        kept = {name: _printable(text) for name, text in fields.items()}
        for name in spare:
            if len("  ".join(kept.values())) > room:
                kept.pop(name, None)
        head, *rest = kept.values()
        line = Table.grid(padding=(0, 2, 0, 0))
        cells: list[Text | ProgressBar] = [Text(head[:room], style="bold" if done is not None else "dim", no_wrap=True)]
        if done is not None and len("  ".join(kept.values())) + 2 + _BAR_COLUMNS <= room:
            cells.append(ProgressBar(1.0, done, _BAR_COLUMNS, style="dim", complete_style="cyan"))
        line.add_row(*cells, *(Text(text, no_wrap=True) for text in rest))
        if self._live is None:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
            self._console.show_cursor(True)  # a process that is killed leaves the terminal as it was
        self._live.update(line, refresh=True)

    def expire(self) -> None:
        """Lets a terminal show the next state at once."""
        if self.moves:
            self._shown_at = -math.inf

    def close(self) -> None:
        """Clears the line; messages may still follow."""
        if self._live is not None:
            self._live.stop()
            self._live = None


@dataclass
class Pace:
    """Seconds per step and samples per step, from the clock alone.

    The first update only starts the clock, as it holds warm-up and compilation. After it, intervals of at least half a
    second each give one time per step; the latest 120 are averaged without the tenth at either end, so that a hiccup
    does not move the estimate. Pauses (saves, sample images) are kept apart and spread over the steps done so far.
    """

    first_step: int | None = None
    first_samples: int = 0
    mark_step: int = 0
    mark_seconds: float = 0.0
    step: int = 0
    samples: int = 0
    pause_seconds: float = 0.0
    paused_at: float = 0.0
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=120))

    @property
    def steps(self) -> int:
        """Updates since the first one that this process did."""
        return 0 if self.first_step is None else self.step - self.first_step

    def update(self, step: int, samples: int, now: float) -> None:
        """`step` updates and `samples` samples were done at `now` seconds."""
        self.step, self.samples = step, samples
        if self.first_step is None:
            self.first_step, self.first_samples = step, samples
            self.mark_step, self.mark_seconds, self.pause_seconds = step, now, 0.0
        elif step > self.mark_step and now - self.mark_seconds >= _INTERVAL_SECONDS:
            self.step_seconds.append((now - self.mark_seconds) / (step - self.mark_step))
            self.mark_step, self.mark_seconds = step, now

    def pause(self, now: float) -> None:
        """Starts a pause: what follows, until `resume`, is not training."""
        self.paused_at = now

    def resume(self, now: float) -> None:
        self.pause_seconds += now - self.paused_at
        self.mark_seconds += now - self.paused_at

    def samples_per_second(self) -> float | None:
        """Speed of training itself, without pauses; None before the first interval."""
        if not self.step_seconds or not self.steps:
            return None
        return (self.samples - self.first_samples) / self.steps / _trimmed_mean(self.step_seconds)

    def seconds_left(self, total_steps: int) -> float | None:
        """Until `total_steps` are done, pauses included; None before the first interval."""
        if not self.step_seconds or not self.steps:
            return None
        pauses = self.pause_seconds / self.steps
        return max(0, total_steps - self.step) * (_trimmed_mean(self.step_seconds) + pauses)


class Progress(StatusLine):
    """The status line of training, on standard output unless a stream is given; plain lines show logged steps only."""

    def __init__(
        self,
        total_steps: int,
        stream: TextIO | None = None,
        *,
        plain_seconds: float = 10.0,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(sys.stdout if stream is None else stream, plain_seconds, environ, clock)
        self._total_steps = total_steps
        self._pace = Pace()
        self._loss = RunningMean()
        self._log: Path | None = None
        self._image_seconds: float | None = None
        self.then: Callable[[float | None], str] = lambda image_seconds: ""
        """What follows the last update and takes its own time, such as `137 images to draw (about 2 min)`, by the
        seconds that an image of the last ones took."""

    def log_to(self, path: Path) -> None:
        """Appends messages to a file from now on, each with its time."""
        self._log = path

    def message(self, text: str) -> None:
        super().message(text)
        if self._log is not None:
            now = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
            with suppress(OSError), self._log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{now.removesuffix('+00:00')}  {_printable(text)}\n")  # a full disk: it was printed

    def update(self, step: int, samples: int, loss: float | None = None) -> None:
        """After an update. `loss` where the step logs, else None: the line shows a running mean of it."""
        self._pace.update(step, samples, self.clock())
        self.remember(loss)
        if (self.moves or loss is not None) and self.due(last=step >= self._total_steps):
            self.show(self._fields(), ("samples", "speed", "loss", "left"), step / max(1, self._total_steps))

    @contextmanager
    def busy(self, text: str, total: int = 0) -> Iterator[Callable[[], None]]:
        """While something else than training goes on (`generating images`): it is not counted in the speed, and a
        terminal shows it in place of the line. Each call of what it yields counts one of `total` images."""
        started, done = self.clock(), 0
        self._pace.pause(started)
        if self.moves:
            self.show({"text": text})

        def count() -> None:
            nonlocal done
            done += 1
            if self.due():
                self.show({"text": f"{text}: {done:,} of {total:,} images"}, done=done / total)

        try:
            yield count
        finally:
            self._pace.resume(self.clock())
            if done:
                self._image_seconds = (self.clock() - started) / done
            self.expire()

    def remember(self, loss: float | None) -> None:
        """Takes a logged loss into the running mean; those of before a restart, too."""
        if loss is not None:
            self._loss.add(loss)

    def _fields(self) -> dict[str, str]:
        """The parts of a line, in reading order."""
        pace, total = self._pace, self._total_steps
        fields = {"step": f"step {pace.step:,}/{total:,}", "samples": f"{pace.samples:,} samples"}
        if (loss := self._loss.value) is not None:
            fields["loss"] = f"loss {loss:.4f}" if loss < 1e4 else f"loss {loss:.3e}"
        speed, left = pace.samples_per_second(), pace.seconds_left(total)
        if speed is not None:
            fields["speed"] = f"{speed:.0f} samples/s" if speed >= 10 else f"{speed:.2f} samples/s"
        if left is not None and pace.step < total:
            then = self.then(self._image_seconds)
            fields["left"] = f"{format_duration(left)} left" + (f", then {then}" if then else "")
        return fields


def _trimmed_mean(values: deque[float]) -> float:
    """Mean without the tenth at either end."""
    spare = len(values) // 10
    inner = sorted(values)[spare : len(values) - spare]
    return sum(inner) / len(inner)


def _printable(text: str) -> str:
    """Without control characters: a file name or a prompt must not drive the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
