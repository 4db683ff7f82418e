"""The previewer of Stage C with tiny networks."""

from pathlib import Path
from typing import Any

from tiny_cascade import EFFNET, PREVIEWER


def settings(folder: Path) -> dict[str, Any]:
    return {"previewer": str(PREVIEWER), "effnet": str(EFFNET)}
