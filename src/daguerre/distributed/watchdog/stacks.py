"""Where the threads of this process stand: for a report about the main thread, and as a file for people.

The file is open from the start and the signal that fills it is answered below the interpreter (faulthandler), so that
a process that holds its interpreter's lock in some library writes its stacks too.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO

from daguerre.distributed.watchdog.processes import DUMP_SIGNAL

_WAITS_FOR_OTHERS = ("/torch/distributed/", "/daguerre/distributed/")
_INNERMOST_FRAMES = 6


class StacksFile:
    """`rank-00003.txt` in a folder, which is made; left out at the end where nothing was written."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank:05d}.txt"
        self._file: IO[str] = self.path.open("w", encoding="utf-8")
        faulthandler.register(DUMP_SIGNAL, self._file, all_threads=True)

    def write(self, head: str) -> None:
        """All threads of this process."""
        self._file.write(f"{head}\n")
        self._file.flush()
        faulthandler.dump_traceback(self._file, all_threads=True)
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """No more is written."""
        faulthandler.unregister(DUMP_SIGNAL)
        empty = self.path.exists() and self.path.stat().st_size == 0
        self._file.close()
        if empty:
            self.path.unlink(missing_ok=True)
            with suppress(OSError):  # others wrote something
                self.path.parent.rmdir()


def main_thread() -> tuple[str, bool]:
    """Where the main thread stands (`save (store.py:118)`), and whether it waits for other ranks there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "nowhere", False
    innermost = _outwards(frame)
    waits = any(part in frame.f_code.co_filename for frame in innermost for part in _WAITS_FOR_OTHERS)
    own = next((f for f in innermost if "/daguerre/" in f.f_code.co_filename), frame)
    return f"{own.f_code.co_name} ({Path(own.f_code.co_filename).name}:{own.f_lineno})", waits


def _outwards(frame: FrameType) -> list[FrameType]:
    found = [frame]
    while len(found) < _INNERMOST_FRAMES and found[-1].f_back is not None:
        found.append(found[-1].f_back)
    return found
