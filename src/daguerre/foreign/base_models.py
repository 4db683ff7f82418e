"""Family of a base model, and what its network was trained to predict.

From the published numbers that ship with the package, or from a folder's own files. Nothing is loaded or fetched.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daguerre import documents, plugins
from daguerre.models.parts.settings import TransformerSettings
from daguerre.models.settings import INDEX
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
    folder = numbers(place)
    name = _class_of(folder)
    if name is None:
        xl = "xl" in str(place).lower()
        return Base("sdxl" if xl else "sd", "eps", known=False)
    if not name.startswith("StableDiffusion"):
        ours = next((each for each in plugins.names("families") if pipeline(each) == name), None)
        return Base(ours or "sd", "flow" if ours and is_flow(ours) else "eps", known=ours is not None)
    family = "sdxl" if "XL" in name else "sd"
    if not architectures.says_scheduler(str(place), folder):
        return Base(family, "eps", known=False)
    return Base(family, PREDICTIONS.get(str((scheduler(folder) or {}).get("prediction_type")), "eps"))


def on_hub(place: Any) -> str:
    """A place as it is, and the address of a file's page on the hub as OWNER/NAME/FILE."""
    return re.sub(r"^https?://[^/]+/([^/]+/[^/]+)/(?:blob|resolve)/[^/]+/", r"\1/", str(place))


def numbers(place: Any) -> Path:
    """The folder with the configs of a base: its own, where it is at hand, or that of the package."""
    folder = Path(str(place)).expanduser()
    return folder if _class_of(folder) else architectures.find(str(place)) or folder


def of_family(family: str) -> str:
    """The hub id of the first published base of a family."""
    ids = architectures.HUB_IDS.items()
    return next(places[0] for name, places in ids if _class_of(architectures.FOLDER / name) == pipeline(family))


def pipeline(family: str) -> str | None:
    """The class of a family's pipelines in diffusers; None for a family without one."""
    found: str | None = getattr(plugins.find("families", family).Settings, "pipeline_class", None)
    return found


def is_flow(family: str) -> bool:
    """True for a family of transformers that are trained by flow matching."""
    return issubclass(plugins.find("families", family).Settings, TransformerSettings)


def references(family: str) -> Any:
    """The reference images that a prompt of a family may have; None where it reads none."""
    return plugins.find("families", family).Settings.reference_rule


def scheduler(folder: Path) -> dict[str, Any] | None:
    """The config of the scheduler in a base's folder; None without one."""
    return _document(folder / "scheduler" / "scheduler_config.json")


def _class_of(folder: Path) -> str | None:
    """The class that the index of a pipeline's folder names; None without an index."""
    found = next(filter(None, (_document(folder / f"{name}.json") for name in (INDEX, f"modular_{INDEX}"))), None)
    return None if found is None else str(found.get("_class_name") or found.get("_blocks_class_name"))


def _document(path: Path) -> dict[str, Any] | None:
    try:
        document = documents.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
