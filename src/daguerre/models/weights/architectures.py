"""Configs of published models, so that they can be described without their weights.

`architectures/NAME` holds the configs of a pipeline's networks and scheduler in diffusers' layout, no weights and no
tokenizers. `architectures/published.json` has the hub ids that they stand for: the first publication, mirrors,
fine-tunes with the same configs, and repositories of one component. The model's own configs, where they are at hand,
come first. No torch here.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "architectures"

_PUBLISHED = json.loads((FOLDER / "published.json").read_text(encoding="utf-8"))

HUB_IDS: dict[str, list[str]] = _PUBLISHED["hub_ids"]
"""Hub ids by the folder that has their numbers, those first that most models are of."""

MOVED: dict[str, str] = _PUBLISHED["moved"]
"""Hub ids of models that their publishers took down. For messages; nothing is read from another place by itself."""

_OTHERWISE = frozenset(hub_id.lower() for hub_id in _PUBLISHED["predicts_otherwise"])
"""Fine-tunes with the numbers of a folder that predict something else than the scheduler there says."""

_NAMES = {hub_id.lower(): name for name, hub_ids in HUB_IDS.items() for hub_id in hub_ids}


def names() -> list[str]:
    """Names of the architectures that come with the package."""
    return list(HUB_IDS)


def moved(hub_id: str) -> str | None:
    """The present hub id of a model that its publisher took down; None for all others."""
    return next((there for gone, there in MOVED.items() if gone.lower() == hub_id.lower()), None)


def find(hub_id: str) -> Path | None:
    """The folder with the numbers of the pipeline that `hub_id` is (or is a component of); None if none is known.

    Takes the name of an architecture too. Upper and lower case are equal, as on the hub.
    """
    name = _NAMES.get(hub_id.lower(), hub_id)
    return FOLDER / name if name in names() else None


def says_scheduler(hub_id: str, folder: Path) -> bool:
    """True unless `folder` is one of these, and stands in for a model that predicts something else than is said
    there."""
    return folder.parent != FOLDER or hub_id.lower() not in _OTHERWISE
