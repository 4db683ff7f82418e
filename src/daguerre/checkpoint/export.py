"""Putting a freshly written folder in the place of an old one, so that a kill or a power cut leaves one of them whole.

For exports, which anybody may open while a run goes on; checkpoints have the stricter protocol of store.py. Knows
nothing of what is in the folder.
"""

import ctypes
import errno
import glob
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from daguerre.checkpoint.atomic import make_folder, sync_folder
from daguerre.fresh import hidden, naming

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """An empty folder to fill; when the block ends it stands, safe on disk, as `folder`.

    If the block raises, or the process dies in it, the old content stays. One process writes at a time: what a
    killed one left behind is cleared here. OSError if the disk refuses, safetensors' own error among them.
    """
    fresh = hidden(folder, f".new-{secrets.token_hex(4)}")
    aside = hidden(folder, ".old")
    make_folder(folder.parent)
    _clear_remains(folder, aside)
    fresh.mkdir()
    try:
        with naming(folder):
            yield fresh
            _settle(fresh)
            _swap(fresh, folder, aside)
    except SafetensorError as error:  # it has the system's error as text: "... (os error 28) ..."
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _clear_remains(folder: Path, aside: Path) -> None:
    if aside.exists() and not folder.exists():
        os.rename(aside, folder)
    for remains in [aside, *folder.parent.glob(f"{glob.escape(hidden(folder, '.new-').name)}*")]:
        shutil.rmtree(remains, ignore_errors=True)


def _settle(folder: Path) -> None:
    """Gives every file the usual permissions (safetensors makes its files private) and waits until the disk has it."""
    usual = folder.stat().st_mode & 0o666
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
            continue
        path.chmod(usual)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def _swap(fresh: Path, folder: Path, aside: Path) -> None:
    if not folder.exists():
        os.rename(fresh, folder)
    elif not _exchange(fresh, folder):
        os.rename(folder, aside)  # a kill before the next line leaves the old one here; the next export puts it back
        os.rename(fresh, folder)
        shutil.rmtree(aside)
    sync_folder(folder.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step (Linux's renameat2); False where the system or file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(other))
