"""Each rank's watchdog: a thread that ends the process when the run cannot go on, and says why first.

The main thread may sit in a collective call that never returns, so nothing here needs it: the thread beats, listens
(distributed/watchdog/heartbeat.py), and on a failure writes the cause, the stacks and the status, ends what does not
end by itself on this node, and leaves by `os._exit`. What a rank was doing is what the main thread said last (`step`,
`doing`).
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

from daguerre.distributed.launch.environment import World
from daguerre.distributed.watchdog import processes
from daguerre.distributed.watchdog.failure import Failure, Report
from daguerre.distributed.watchdog.heartbeat import Heartbeat
from daguerre.distributed.watchdog.processes import DUMP_SIGNAL
from daguerre.errors import ReportedElsewhere, UserError

_TICK_SECONDS = 0.2
_WORDS_SECONDS = 3.0
"""The longest that writing the cause, or the status, may take: a disk or a pipe may hang."""
_OWN_END_SECONDS = 1.0
"""After another rank has failed, this one may be about to fail of the same: its own error is then the better one."""
_OTHERS_END_SECONDS = 5.0
"""Time for other processes of this node to end by themselves."""
_FAILED_END_SECONDS = 7.0
"""The same where one failed by an error of its own, which it is still telling."""
_CAUSE_SECONDS = 4.0
"""Longest wait of an error that may come from another rank's end, for that to be known."""
_SLOW_STEPS = 10
"""A step that takes less than so many times the slowest one is slow, not stuck, whatever `stuck_seconds` says."""
_WAITS_FOR_OTHERS = ("/torch/distributed/", "/daguerre/distributed/")
_INNERMOST_FRAMES = 6
_FROM_OTHERS = re.compile(r"gloo|nccl|connection|peer|socket|timed out|timeout|store", re.IGNORECASE)


class Watchdog:
    """`with Watchdog(...) as watch:` around all that needs the other ranks; main thread only.

    The loop calls `watch.step(n)` after each update and wraps what takes its time in `with watch.doing(...)`.
    """

    def __init__(
        self, world: World, link: Heartbeat, stacks: StacksFile | None, on_end: Callable[[Failure], None]
    ) -> None:
        """`on_end` writes the status; it is called on one rank, from the watchdog's thread, and has three seconds."""
        self._world, self._link, self._stacks, self._on_end = world, link, stacks, on_end
        self._parent = os.getppid()
        self._count, self._step = 0, 0
        self._phase: tuple[str, float | None] = ("starting", None)
        self._stepped_at: float | None = None
        self._slowest_seconds = 0.0
        self._leaving, self._known = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._orphan_since: float | None = None

    def step(self, number: int) -> None:
        """The run got further: `number` updates are done. The first may last, as it compiles and warms up."""
        now = time.monotonic()
        if self._stepped_at is not None:
            self._slowest_seconds = max(self._slowest_seconds, now - self._stepped_at)
        self._stepped_at = now
        self._step, self._count = number, self._count + 1
        if self._phase[0] in ("starting", "training"):
            self._phase = ("training", _SLOW_STEPS * self._slowest_seconds)

    def alive(self) -> None:
        """The phase got further: an image is generated, a file is written."""
        self._count += 1

    @contextmanager
    def doing(self, what: str, seconds: float | None = None) -> Iterator[None]:
        """A phase that may last so long without a step; None for as long as it likes."""
        before, self._phase = self._phase, (what, seconds)
        self._count += 1
        try:
            yield
        finally:
            self._phase, self._stepped_at = before, None  # the next step did not take all of this
            self._count += 1

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and may_come_from_others(error) and self._known.wait(_CAUSE_SECONDS):
            time.sleep(_WORDS_SECONDS + _OTHERS_END_SECONDS)  # the thread ends the process meanwhile
        self._leaving.set()
        self._thread.join(_WORDS_SECONDS)
        self._link.leave(_last_words(error))
        if self._stacks is not None:
            self._stacks.close()

    def report(self) -> Report:
        doing, seconds = self._phase
        return Report(self._count, self._step, doing, seconds, *main_thread())

    def _run(self) -> None:
        while not self._leaving.is_set():
            failure = self._link.turn(self.report(), _TICK_SECONDS) or self._orphaned()
            if failure is None:
                continue
            self._known.set()
            if failure.kind == "failed" and self._leaving.wait(_OWN_END_SECONDS):
                return
            self._end(failure)

    def _orphaned(self) -> Failure | None:
        """Stops a run whose launcher's process is gone, as by SIGTERM; a rank that does not stop is ended."""
        if self._world.launcher == "none" or os.getppid() == self._parent:
            return None
        limit = self._link.limits.stuck_seconds
        if self._orphan_since is None:
            self._orphan_since = time.monotonic()
            self._say(f"{self._world.launcher} (process {self._parent}) has exited: stopping")
            os.kill(os.getpid(), signal.SIGTERM)
        if time.monotonic() - self._orphan_since < limit:
            return None
        text = f"{self._world.launcher} has exited, but the run did not stop within {limit:g} s (stuck_seconds)"
        return Failure("orphaned", (), text, self._world.size)

    def _end(self, failure: Failure) -> None:
        """Never returns."""
        rank = self._world.rank
        self._say(failure.text)
        if failure.stacks and self._stacks is not None:
            stacks, head = self._stacks, f"rank {rank}, process {os.getpid()}: {self.report()}\n{failure.text}"
            within(_WORDS_SECONDS, lambda: stacks.write(head))
            self._say(f"stacks of this rank: {stacks.path}")
        if failure.writer == rank:
            within(_WORDS_SECONDS, lambda: self._on_end(failure))
        self._link.settle()
        me = self._link.peers[rank]
        here = [peer for peer in self._link.peers.values() if peer.home == me.home and peer.rank != rank]
        first = all(peer.rank in failure.ranks or peer.rank > rank for peer in here)
        if first and rank not in failure.ranks:  # the first of this node that is not at fault
            patience = _FAILED_END_SECONDS if failure.kind == "failed" else _OTHERS_END_SECONDS
            processes.end(here, patience, failure.stacks)
        os._exit(failure.code)

    def _say(self, text: str) -> None:
        """To the log, past the interpreter's buffers, whose locks the main thread may hold."""
        data = "".join(f"daguerre: [rank {self._world.rank}] {line}\n" for line in text.split("\n")).encode()
        within(_WORDS_SECONDS, lambda: os.write(2, data))


def _last_words(error: BaseException | None) -> str:
    """The words by which the others hear of an end; none if it is in order, or if another rank tells of the error: then
    nobody is to be ended before that one has spoken."""
    if error is None or isinstance(error, (SystemExit, ReportedElsewhere)):
        return ""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}".rstrip(": ")


def may_come_from_others(error: BaseException) -> bool:
    """True if an error, or one behind it, looks like the end of another rank in a collective call."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (RuntimeError, OSError)) and _FROM_OTHERS.search(f"{type(seen).__name__} {seen}"):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def within(seconds: float, act: Callable[[], object]) -> bool:
    """Does something in a thread of its own; whether it was done in time."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


class StacksFile:
    """A file with the stacks of this process, for people: `rank-00003.txt` in a folder, which is made; left out at the
    end if nothing was written.

    The file is open from the start and the signal that fills it is answered below the interpreter (faulthandler), so
    that a process that holds its interpreter's lock in some library writes its stacks too.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank:05d}.txt"
        self._file: IO[str] = self.path.open("w", encoding="utf-8")
        faulthandler.register(DUMP_SIGNAL, self._file, all_threads=True)

    def write(self, head: str) -> None:
        self._file.write(f"{head}\n")
        self._file.flush()
        faulthandler.dump_traceback(self._file, all_threads=True)
        os.fsync(self._file.fileno())

    def close(self) -> None:
        faulthandler.unregister(DUMP_SIGNAL)
        empty = self.path.exists() and self.path.stat().st_size == 0
        self._file.close()
        if empty:
            self.path.unlink(missing_ok=True)
            with suppress(OSError):  # others wrote something
                self.path.parent.rmdir()


def main_thread() -> tuple[str, bool]:
    """Position of the main thread (`save (store.py:118)`), and whether it waits for other ranks there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "nowhere", False
    innermost: list[FrameType] = []
    while (outer := innermost[-1].f_back if innermost else frame) and len(innermost) < _INNERMOST_FRAMES:
        innermost.append(outer)
    waits = any(part in frame.f_code.co_filename for frame in innermost for part in _WAITS_FOR_OTHERS)
    own = next((f for f in innermost if "/daguerre/" in f.f_code.co_filename), frame)
    return f"{own.f_code.co_name} ({Path(own.f_code.co_filename).name}:{own.f_lineno})", waits
