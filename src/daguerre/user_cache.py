"""The user's cache folder, for files that can be made or fetched again. No torch here."""

import os
from pathlib import Path


def folder() -> Path:
    """`daguerre` in the user's cache folder, which XDG_CACHE_HOME can move."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "daguerre"
