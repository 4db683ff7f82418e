"""Family of a base model, and what its UNet was trained to predict.

From the published numbers that ship with the package, or from a folder's own files. Nothing is loaded or fetched.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daguerre.models.weights import architectures

PREDICTIONS = {"epsilon": "eps", "v_prediction": "v", "sample": "x0"}
"""diffusers' prediction types and the objectives that they are."""


@dataclass(frozen=True)
class Base:
    """Facts about a base model."""

    family: str
    objective: str
    known: bool = True
    """False if it is taken for what most are."""

    @property
    def doubt(self) -> str:
        """A remark on one that is not known; empty for others."""
        return (
            ""
            if self.known
            else (f"assumed to be a model of family {self.family} that predicts {self.objective}: please check")
        )


def base(place: Any) -> Base:
    """Reads what the base model at a place is; one that is not at hand is taken for Stable Diffusion 1's kind."""
    folder = Path(str(place)).expanduser()
    folder = folder if (folder / "model_index.json").is_file() else architectures.find(str(place)) or folder
    index, scheduler = (_document(folder / name) for name in ("model_index.json", "scheduler/scheduler_config.json"))
    if index is None:
        xl = "xl" in str(place).lower()
        return Base("sdxl" if xl else "sd", "eps", known=False)
    family = "sdxl" if "XL" in str(index.get("_class_name")) else "sd"
    if not architectures.says_scheduler(str(place), folder):
        return Base(family, "eps", known=False)
    return Base(family, PREDICTIONS.get(str((scheduler or {}).get("prediction_type")), "eps"))


def _document(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
