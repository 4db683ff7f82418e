"""Stage A of Stable Cascade with a tiny network."""

from pathlib import Path
from typing import Any

from tiny_cascade import VQGAN


def settings(folder: Path) -> dict[str, Any]:
    return {"vqgan": VQGAN}
