"""Where Daguerre keeps what it can make or fetch again: the user's cache folder. No torch here."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """`daguerre` in the user's cache folder, which XDG_CACHE_HOME can move."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "daguerre"
