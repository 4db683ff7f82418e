"""The files of an evaluation: result.json in a folder for each checkpoint and protocol, which reports read."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from daguerre import __version__
from daguerre.checkpoint.atomic import locked, write_json_atomically
from daguerre.errors import UserError
from daguerre.evaluation.result import Result
from daguerre.evaluation.settings import EvaluationSettings

NAME = "result.json"


def write(
    folder: Path, protocol: Mapping[str, Any], settings: EvaluationSettings, tables: Mapping[str, Result]
) -> dict[str, Any]:
    """Adds tables to the result of a folder, in place of those of the same names; returns the document."""
    path = folder / NAME
    metrics = {name: own.model_dump(mode="json") for name, own in settings.metrics.items()}
    with locked(folder):
        known = read(folder)
        before = known.get("tables", {})
        documents = {name: result.document() for name, result in tables.items()}
        document = {
            "made_by": f"daguerre {__version__}",
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "protocol": dict(protocol),
            "software": software(),
            # Absolute, as comparisons read it from anywhere.
            "reference": str(Path(settings.reference).expanduser().absolute())
            if settings.reference
            else known.get("reference"),
            "metrics": known.get("metrics", {}) | metrics,
            "tables": before | documents,
        }
        write_json_atomically(path, document)
    return document


def software() -> dict[str, str]:
    """Versions that numbers depend on."""
    own = {"daguerre": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return own | {name: version(name) for name in ("diffusers", "transformers", "pillow")}


def read(folder: Path) -> dict[str, Any]:
    """The result of a folder; empty if there is none yet. UserError for a damaged one."""
    path = folder / NAME
    try:
        found: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
        return found
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): remove it, and evaluate again", code="damaged") from error
