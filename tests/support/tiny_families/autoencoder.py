"""The autoencoder that ships."""

from pathlib import Path
from typing import Any

from daguerre.config import recipe


def settings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = recipe.layers("quickstart_vae")[-1].tree["model"]
    return found
