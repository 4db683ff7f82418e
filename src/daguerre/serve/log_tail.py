"""The end of what a run has said, from its log file."""

import os
from pathlib import Path

from daguerre.checkpoint.run_dir import RunFolder
from daguerre.report.html import Html, element

_BYTES = 24 << 10


def tail(folder: Path) -> Html | None:
    """The last lines; None of a run without a log."""
    try:
        with RunFolder(folder).log.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = os.pread(file.fileno(), _BYTES, max(0, size - _BYTES))
    except OSError:
        return None
    text = data.decode("utf-8", "replace")
    if size > _BYTES:
        text = text.partition("\n")[2]
    shown = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text).rstrip()
    return element("pre", shown, class_="log", tabindex=0, role="log") if shown else None
