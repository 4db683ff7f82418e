"""Ranges of local files, by descriptors that stay open and that threads may share; pipes and devices are refused."""

import errno
import os
from collections import OrderedDict
from itertools import count
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from daguerre.regular import check_regular

OPEN_FILES = 256
"""Most descriptors that are kept: a strict filter reads from more than a hundred shards at a time."""
SWEEP = 16
"""Files that are opened between two sweeps for deleted ones, which take space on the disk until they are closed; a
deleted one that is asked for starts a sweep at once, as files go many at a time."""
NO_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL})
"""Errors of opening a path that never holds a file, whatever the state of the disk is."""


def version(path: Path) -> str:
    """Differs for a file that was written or replaced, also where its size and time were set back: by inode and both
    times. OSError.

    Other rights, another owner and a copy change it too, so one that differs says to read again, not that bytes differ.
    """
    return version_of(os.stat(path))


def version_of(found: os.stat_result) -> str:
    """`version` of a file that was asked already."""
    # Without the device: a disk that is far has another number on each machine.
    return f"{found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"


def opened(path: Path) -> BinaryIO:
    """A file for reading. OSError as `check_regular`."""
    check_regular(path)
    return path.open("rb")


class _Descriptor:
    """Closed with its last reference, so that eviction never closes it under a reader."""

    def __init__(self, path: str) -> None:
        check_regular(Path(path))
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)

    @property
    def deleted(self) -> bool:
        """True if its name leads nowhere now, or to another file."""
        return os.fstat(self.number).st_nlink == 0


_OPEN: OrderedDict[str, _Descriptor] = OrderedDict()
_LOCK = Lock()
_opened = count()


def read(path: Path, start: int, length: int) -> bytes:
    """The bytes from `start` on; fewer than `length` if the file ends before. OSError as the system gives it."""
    descriptor = _descriptor(str(path))
    parts = []
    while length:
        part = os.pread(descriptor.number, length, start)
        if not part:
            break
        parts.append(part)
        start, length = start + len(part), length - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _descriptor(path: str) -> _Descriptor:
    with _LOCK:
        found = _OPEN.get(path)
        if found is None or found.deleted:
            if found is not None or next(_opened) % SWEEP == 0:
                found = None  # so that it is closed with the others
                for name in [name for name, one in _OPEN.items() if one.deleted]:
                    del _OPEN[name]
            found = _OPEN[path] = _Descriptor(path)
        _OPEN.move_to_end(path)
        while len(_OPEN) > OPEN_FILES:
            _OPEN.popitem(last=False)
        return found
