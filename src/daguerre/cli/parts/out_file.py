"""The file that a verb writes, looked at before the work and not after it."""

from pathlib import Path

from daguerre.errors import UserError


def place(given: str | Path) -> Path:
    """The path of a file to write. UserError for one in a folder that is not there, and for a folder."""
    path = Path(given).expanduser()
    if not path.parent.is_dir():
        raise UserError(f"out={path}: there is no folder {path.parent}", code="missing", setting="out")
    if path.is_dir():
        raise UserError(f"out={path} is a folder: give the name of a file", code="conflict", setting="out")
    return path
