"""Files that are none: pipes, sockets and devices, of which opening one may block, and reading one may never end."""

import errno
import os
import stat
from pathlib import Path


class Irregular(OSError):
    """A pipe, socket or device where a file was expected, or a link that leads back to itself."""


def asked(path: Path) -> os.stat_result:
    """The `os.stat` of a path. `Irregular` for a link that leads back to itself; other OSErrors as they are."""
    try:
        return os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Irregular(*error.args, str(path)) from error
        raise


def check_regular(path: Path) -> None:
    """`Irregular` for anything that exists and is not a file; other OSErrors as the system gives them."""
    mode = asked(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise Irregular(errno.EINVAL, "is a pipe, a socket or a device, not a file", str(path))


def content(path: Path) -> bytes:
    """The bytes of a file. `Irregular` for anything that exists and is not a file; OSError."""
    check_regular(path)
    return path.read_bytes()


def is_loop(path: str) -> bool:
    """True of a link that leads back to itself, or on through too many others."""
    try:
        os.stat(path)
    except (OSError, ValueError) as error:
        return isinstance(error, OSError) and error.errno == errno.ELOOP
    return False


def is_odd(path: str) -> bool:
    """True of a pipe, a socket or a device; False of files, folders and texts that name nothing."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
