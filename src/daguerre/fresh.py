"""Files that are being written: the name that one has until it is whole, and the name in an error of the system."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

_NAME_BYTES = 255
"""The longest name in a folder, on all usual file systems."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of writing where there is no room: on the disk, for this user, or in one file."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an OSError of a full disk the name of this file: it has none where the file is open, or the hidden one."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:  # others may come from what is read in the block
            error.filename, error.filename2 = str(path), None
        raise


def hidden(path: Path, end: str) -> Path:
    """The hidden name with this end next to a file or folder, under which it is written first."""
    name = f".{path.name}{end}"
    if len(os.fsencode(name)) > _NAME_BYTES:
        name = f".{sha256(os.fsencode(path.name)).hexdigest()[:32]}{end}"
    return path.with_name(name)
