"""A tracker in a thread of its own: training never waits for it, and its errors end it alone."""

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from types import TracebackType

import numpy as np

from daguerre.credentials import scrub
from daguerre.formatting import first_line
from daguerre.tracking.sinks import Sink

LIMIT = 4096
"""Calls that may wait for the tracker."""
PATIENCE_SECONDS = 60.0
"""Time that the end of a run waits for the tracker."""


class Background:
    """Hands all calls to the sink of `start`, which is called in the thread, too.

    The first error (of any kind), a queue that is full, or an end that takes too long is reported once; after it the
    tracker gets nothing more until the run is started again.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Sink],
        say: Callable[[str], None],
        limit: int = LIMIT,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.name, self._say, self._patience_seconds = name, say, patience_seconds
        self._waiting: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(limit)
        self._failed = False
        self._thread = threading.Thread(target=self._work, args=(start,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, samples: int, values: Mapping[str, float]) -> None:
        """As `Sink.write`; returns at once."""
        kept = dict(values)
        self.call(lambda sink: sink.write(step, samples, kept))

    def show(self, step: int, name: str, pixels_HWC: np.ndarray, text: str) -> None:
        """As `Sink.show`; returns at once."""
        self.call(lambda sink: sink.show(step, name, pixels_HWC, text))

    def call(self, act: Callable[[Sink], None]) -> None:
        """Calls `act` in the thread, when the tracker has taken all that came before; returns at once."""
        self._put(act)

    def close(self) -> None:
        """Waits until the tracker has taken all, at most `patience_seconds`."""
        self._put(None)
        if not self._failed:
            self._thread.join(self._patience_seconds)
        if self._thread.is_alive():
            self._fail(f"it has not finished within {self._patience_seconds:g} s")

    def _put(self, call: Callable[[Sink], None] | None) -> None:
        if not self._failed:
            try:
                self._waiting.put_nowait(call)
            except queue.Full:
                self._fail(f"it is {self._waiting.maxsize:,} calls behind")

    def _work(self, start: Callable[[], Sink]) -> None:
        with ExitStack() as stack:
            stack.push(self._swallow)
            with closing(start()) as sink:
                while (call := self._waiting.get()) is not None and not self._failed:
                    call(sink)

    def _swallow(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Ends the tracker at its error, of whatever kind: what other packages raise is not ours to know."""
        if error is not None:
            self._fail(f"{type(error).__name__}: {first_line(error)}")
        return True

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            self._say(
                f"tracker {self.name} FAILED: {scrub(why)}. The run continues without it; all numbers are in "
                "metrics/metrics.jsonl"
            )
