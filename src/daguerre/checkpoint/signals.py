"""SIGTERM, SIGUSR1 and SIGINT as a question that the driver of the loop asks after each update.

A signal never interrupts an update or a save; whoever holds `StopSignals` saves, writes the status and exits with
`exit_code`. Nothing here saves anything.
"""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopSignals:
    """`with StopSignals() as stop: ...; if stop.requested: save and leave`. Main thread only.

    The first signal is remembered. After a SIGINT the next SIGINT is Python's own again (KeyboardInterrupt), for a
    person who will not wait; not where a launcher hands it on, as one Ctrl-C then comes twice (`launched`). Forked
    children ignore SIGINT and SIGUSR1 (the terminal, or a batch system, sends them to children too) and die of SIGTERM.
    """

    def __init__(self, launched: bool = False) -> None:
        self._launched = launched
        self.signal: signal.Signals | None = None
        """The first signal that came, or None."""
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """True once the run should save and exit."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells have it: 130 SIGINT, 138 SIGUSR1, 143 SIGTERM; 0 for none."""
        return 128 + self.signal if self.signal is not None else 0

    def __enter__(self) -> StopSignals:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.signal = self.signal or signal.Signals(number)
        if number == signal.SIGINT and not self._launched:
            signal.signal(number, signal.default_int_handler)
