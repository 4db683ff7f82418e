"""An environment that has what this Python has installed, but nothing of the clone."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(home):
    """The variables of a shell that knows nothing of the clone."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DAGUERRE_"))}
    return own | {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}


def dependencies(folder):
    """Links to all that this Python has installed but Daguerre, and no start-up file (.pth) that names the clone."""
    folder.mkdir()
    for entry in (Path(path) for path in reversed(sys.path) if Path(path).name in ("site-packages", "dist-packages")):
        for path in entry.iterdir():
            if path.suffix != ".pth" and not path.name.startswith(("daguerre", "__editable__", "__pycache__")):
                (folder / path.name).unlink(missing_ok=True)
                (folder / path.name).symlink_to(path)
    return folder
