"""The index of a pipeline in diffusers' layout: its classes by component, of a modular pipeline also their places. No
torch here."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from daguerre import documents

PLAIN, MODULAR = "model_index.json", "modular_model_index.json"
NAMES = (PLAIN, MODULAR)
_PLACE = "pretrained_model_name_or_path"


def find(folder: Path) -> Path | None:
    """The index in a folder; None for what is no pipeline."""
    return next((folder / name for name in NAMES if (folder / name).is_file()), None)


def modular(kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a modular pipeline for components by library and class, without a place: diffusers then reads them
    from the folder that the index is in."""
    return {name: [*kind, {_PLACE: None, "subfolder": name, "type_hint": kind}] for name, kind in kinds.items()}


def at(path: Path, place: str) -> bytes:
    """The index of a modular pipeline that lies at `place` of the hub, where each entry has to name it."""
    content = documents.read_object(path)
    for entry in content.values():
        if isinstance(entry, list):
            entry[-1][_PLACE] = place
    return json.dumps(content, indent=2).encode()
