"""Bounds of what the page may read: nothing outside the roots, no pipe, no file too large to be what it claims to be.

A file that is too large is left out where it is read (`report.run`), so that the rest of its run is shown.

A run folder may come from a stranger. Its links may lead out of it, its files may be pipes, and its texts may be made
to be expanded for ever.
"""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from daguerre.checkpoint.run_dir import EXPORTS
from daguerre.errors import UserError

_LARGE = ("checkpoints", *EXPORTS, "generated", "profile")
"""Folders of a run of which no file is read for a page."""


class OutOfBounds(UserError):
    """A file of a run that the page must not read; the message says which, and why."""


def within(path: Path, roots: Sequence[Path]) -> bool:
    """True if a path, its links followed, is a root or below one."""
    resolved = path.resolve()
    return any(resolved == root or root in resolved.parents for root in roots)


def check_file(path: Path, roots: Sequence[Path], most_bytes: int | None = None) -> None:
    """OutOfBounds for a file that is a pipe or a device, is too large, or lies outside the roots; OSError."""
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        if not within(path, roots):
            raise OutOfBounds(f"{path.name} is a link to a place outside the folders that this page may show")
        found = os.stat(path)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise OutOfBounds(f"{path.name} is a pipe, a socket or a device, not a file")
    if most_bytes is not None and found.st_size > most_bytes:
        raise OutOfBounds(f"{path.name} has {found.st_size:,} bytes, more than such a file ever has")


def check_run(folder: Path, roots: Sequence[Path]) -> None:
    """OutOfBounds if a run folder holds anything that a page about it must not read; OSError."""
    if not within(folder, roots):
        raise OutOfBounds(f"{folder.name} is a link to a place outside the folders that this page may show")
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        with os.scandir(place) as entries:
            for entry in entries:
                if place == folder and entry.name in _LARGE:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                    continue
                if not entry.is_file(follow_symlinks=False):
                    check_file(Path(entry.path), roots)
