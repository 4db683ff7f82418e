"""SDXL with tiny networks."""

from pathlib import Path
from typing import Any

from tiny_models import write_sdxl


def settings(folder: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(write_sdxl(folder / "sdxl"))}
