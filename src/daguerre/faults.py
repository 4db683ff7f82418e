"""Faults of the program or of the machine: two lines for the user, and a file with the traceback to send.

Errors that a user can cause and fix are `UserError`s and never get here.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from daguerre import __version__
from daguerre.credentials import scrub

_LENGTH = 300
_FILE = "_daguerre_fault_file"
"""Attribute of an error that is in a file already."""


def install() -> None:
    """Makes this process report uncaught exceptions; Python then exits with 1."""
    sys.excepthook = tell
    threading.excepthook = _ended


def _ended(died: threading.ExceptHookArgs) -> None:
    """Tells of an error that ended a thread. A thread that keeps it (TensorBoard's writer does) raises it again where
    the thread is used, and it is reported there."""
    if died.exc_value is None or getattr(died.thread, "exception", None) is not died.exc_value:
        tell(died.exc_type, died.exc_value or died.exc_type(), died.exc_traceback)


def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints two lines on stderr, without secrets, and writes the traceback to a file."""
    path = recorded(error, Path.cwd())
    where = (
        f"The traceback is in {path}: please report it with that file, which contains no passwords"
        if path
        else _text(error)
    )
    print(f"daguerre: internal error: {_line(error)}\n{where}", file=sys.stderr)


def recorded(error: BaseException, folder: Path) -> Path | None:
    """The file with the error's traceback, written once, in this folder or else the one for temporary files; None if
    neither can be written."""
    known = getattr(error, _FILE, None)
    if known is not None:
        return Path(known)
    import tempfile  # with its imports a fifth of the time of a command that does little

    name = f"daguerre-fault-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for place in (folder, Path(tempfile.gettempdir())):
        with suppress(OSError):
            path = place.absolute() / name
            path.write_text(_text(error), encoding="utf-8", errors="backslashreplace")
            setattr(error, _FILE, str(path))
            return path
    return None


def _text(error: BaseException) -> str:
    """Versions, the command and the traceback, without values of variables."""
    import platform  # as tempfile above
    import traceback

    command = " ".join(map(scrub, sys.argv))
    about = f"daguerre {__version__}, Python {platform.python_version()}, {platform.platform()}\n{command}\n\n"
    return about + scrub("".join(traceback.format_exception(error)))


def _line(error: BaseException) -> str:
    text = scrub(" ".join(f"{type(error).__name__}: {error}".split()))
    return text if len(text) <= _LENGTH else text[: _LENGTH - 4] + " ..."
