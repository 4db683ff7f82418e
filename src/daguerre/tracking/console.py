"""What a run says while it trains: one line that keeps still on a terminal, plain lines in a pipe or a log file.

Holds the line, the messages above it and the estimate of the time left. It measures nothing of the run but the clock,
and decides nothing: the driver says what has happened.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TextIO

from daguerre.formatting import duration_text

_REDRAW_SECONDS = 0.1
_INTERVAL_SECONDS = 0.5
_BAR_COLUMNS = 24
_LOSS_MEMORY = 0.95
_DIM, _BOLD, _RESET = "\x1b[2m", "\x1b[1m", "\x1b[0m"
CLEAR = "\r\x1b[2K"
"""Goes to the start of the line and empties it."""


def moving(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a line of `stream` may be written over: it is a terminal that can move its cursor."""
    return stream.isatty() and environ.get("TERM") not in (None, "", "dumb")


@dataclass
class Pace:
    """Seconds a step and samples a step, from the clock alone.

    The first update only starts the clock, as it holds warm-up and compilation. After it, stretches of at least half a
    second each give one time a step; the latest 120 are averaged without the tenth at either end, so that a hiccup
    does not move the estimate. Pauses (saves, pictures) are kept apart and spread over the steps done so far.
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
        """What follows, until `resume`, is no training."""
        self.paused_at = now

    def resume(self, now: float) -> None:
        """End the pause."""
        self.pause_seconds += now - self.paused_at
        self.mark_seconds += now - self.paused_at

    def samples_per_second(self) -> float | None:
        """Speed of training itself, without pauses; None before the first stretch."""
        if not self.step_seconds or self.first_step is None or self.step == self.first_step:
            return None
        samples_per_step = (self.samples - self.first_samples) / (self.step - self.first_step)
        return samples_per_step / _trimmed_mean(self.step_seconds)

    def seconds_left(self, total_steps: int) -> float | None:
        """Until `total_steps` are done, pauses included; None before the first stretch."""
        if not self.step_seconds or self.first_step is None or self.step == self.first_step:
            return None
        pauses = self.pause_seconds / (self.step - self.first_step)
        return max(0, total_steps - self.step) * (_trimmed_mean(self.step_seconds) + pauses)


class Progress:
    """The terminal of one run; use it in a `with`, so that the line is put away whatever happens.

    `stream` is standard output unless given. It gets a moving line if it is a terminal (and TERM is not `dumb`), else
    plain lines, at most one in `plain_seconds` besides the first and the last. NO_COLOR turns the shades off.
    """

    def __init__(
        self,
        total_steps: int,
        stream: TextIO | None = None,
        *,
        plain_seconds: float = 10.0,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._stream = sys.stdout if stream is None else stream
        self._moving = moving(self._stream, environ)
        self._color = self._moving and not environ.get("NO_COLOR")
        self._plain_seconds = plain_seconds
        self._clock = clock
        self._pace = Pace()
        self._loss, self._loss_weight = 0.0, 0.0
        self._line = ""
        self._drawn_at = -math.inf

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def message(self, text: str) -> None:
        """Print `text` for good; on a terminal it goes above the moving line."""
        if self._moving:
            self._write((CLEAR if self._line else "") + _printable(text) + "\n" + self._line)
        else:
            self._write(_printable(text) + "\n")

    def update(self, step: int, samples: int, loss: float | None = None) -> None:
        """After an update. `loss` where the step logs, else None: the line shows a running mean of it."""
        now = self._clock()
        self._pace.update(step, samples, now)
        self.remember(loss)
        last = step >= self._total_steps
        if self._moving and (last or now - self._drawn_at >= _REDRAW_SECONDS):
            self._draw(self._moving_line(self._columns()))
            self._drawn_at = now
        elif not self._moving and loss is not None and (last or now - self._drawn_at >= self._plain_seconds):
            self._write("  ".join(self._fields().values()) + "\n")
            self._drawn_at = now

    @contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """While something else than training goes on (`drawing pictures`): it is not counted in the speed, and on a
        terminal it is said in place of the moving line."""
        self._pace.pause(self._clock())
        if self._moving:
            self._draw(self._shade(_DIM, _printable(text)[: self._columns() - 1]))
        try:
            yield
        finally:
            self._pace.resume(self._clock())
            self._drawn_at = -math.inf if self._moving else self._drawn_at

    def close(self) -> None:
        """Take the moving line away; messages may still follow."""
        if self._line:
            self._write(CLEAR)
            self._line = ""

    def remember(self, loss: float | None) -> None:
        """Takes a logged loss into the running mean; those of before a restart, too."""
        if loss is not None and math.isfinite(loss):
            self._loss = _LOSS_MEMORY * self._loss + loss
            self._loss_weight = _LOSS_MEMORY * self._loss_weight + 1.0

    def _fields(self) -> dict[str, str]:
        """The parts of a line, in reading order."""
        pace, total = self._pace, self._total_steps
        fields = {"step": f"step {pace.step:,}/{total:,}", "samples": f"{pace.samples:,} samples"}
        if self._loss_weight:
            loss = self._loss / self._loss_weight
            fields["loss"] = f"loss {loss:.4f}" if loss < 1e4 else f"loss {loss:.3e}"
        speed, left = pace.samples_per_second(), pace.seconds_left(total)
        if speed is not None:
            fields["speed"] = f"{speed:.0f} samples/s" if speed >= 10 else f"{speed:.2f} samples/s"
        if left is not None and pace.step < total:
            fields["left"] = f"{duration_text(left)} left"
        return fields

    def _moving_line(self, columns: int) -> str:
        """As many parts as `columns` hold; the bar is given up first, the step last."""
        room = columns - 1  # a full last column wraps on some terminals
        fields = self._fields()
        for spare in ("samples", "speed", "loss", "left"):
            if len("  ".join(fields.values())) > room:
                fields.pop(spare, None)
        head, *rest = fields.values()
        has_bar = len("  ".join(fields.values())) + 2 + _BAR_COLUMNS <= room
        return "  ".join([self._shade(_BOLD, head[:room]), *([self._bar()] if has_bar else []), *rest])

    def _bar(self) -> str:
        full, empty = ("━", "─") if _can_encode("━─", self._stream) else ("#", "-")
        done = min(1.0, self._pace.step / max(1, self._total_steps))
        columns = int(done * _BAR_COLUMNS)
        return full * columns + self._shade(_DIM, empty * (_BAR_COLUMNS - columns))

    def _shade(self, code: str, text: str) -> str:
        return f"{code}{text}{_RESET}" if self._color and text else text

    def _columns(self) -> int:
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except OSError:
            columns = 80
        return columns or 80  # some terminals say 0

    def _draw(self, line: str) -> None:
        self._line = line
        self._write(CLEAR + line)

    def _write(self, text: str) -> None:
        """One write a change, so that nothing flickers; characters that the stream has not become `?`."""
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


def _trimmed_mean(values: deque[float]) -> float:
    """Mean without the tenth at either end."""
    spare = len(values) // 10
    inner = sorted(values)[spare : len(values) - spare]
    return sum(inner) / len(inner)


def _printable(text: str) -> str:
    """Without control characters: a file name or a prompt must not drive the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _can_encode(text: str, stream: TextIO) -> bool:
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
