"""Words for what a store or a disk refuses."""

from pathlib import Path

from daguerre.errors import UserError
from daguerre.storage.errors import StoreError


def explained(error: OSError | UserError) -> str:
    """Says what was refused, without the setting that names the place."""
    if isinstance(error, StoreError):
        return error.explanation
    if isinstance(error, UserError):
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)


def unreadable(to: Path, error: OSError) -> str:
    """The same of files that could not be fetched to this machine."""
    if isinstance(error, StoreError):
        return error.explanation
    return (
        f"cannot download files of the run to {error.filename or to}: {error.strerror}. They go into the user's "
        "cache folder, which XDG_CACHE_HOME can change: free some space there"
    )
