"""Files that are none: pipes, sockets and devices, of which opening one may block, and reading one may never end."""

import errno
import os
import stat
from pathlib import Path


class Irregular(OSError):
    """A pipe, socket or device where a file was expected."""


def check_regular(path: Path) -> None:
    """`Irregular` for anything that exists and is not a file; other OSErrors as the system gives them."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise Irregular(errno.EINVAL, "is a pipe, a socket or a device, not a file", str(path))


def is_odd(path: str) -> bool:
    """True of a pipe, a socket or a device; False of files, folders and texts that name nothing."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
