"""The files of an evaluation: result.json in a folder for each checkpoint and protocol, which reports read."""

from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, FiniteFloat, ValidationError, model_validator

from daguerre import __version__, documents
from daguerre.checkpoint.atomic import locked, write_json_atomically
from daguerre.errors import UserError
from daguerre.evaluation.metric import MetricSettings
from daguerre.evaluation.result import Result
from daguerre.evaluation.settings import EvaluationSettings
from daguerre.models.weights.file_digests import sha256

NAME = "result.json"
OF_FOLDERS = Path("runs") / "evaluations"
"""Results of folders of images, unless `out` names another place."""


class _Row(BaseModel, extra="forbid"):
    """`result.Row.document`."""

    name: str
    value: FiniteFloat
    must: float | None = None
    aim: float | None = None
    share: bool = True
    better: Literal["higher", "lower", ""] = ""
    low: float | None = None
    high: float | None = None


class _Settings(BaseModel):
    name: str


class _Reference(BaseModel):
    sha256: str


class _MadeWith(BaseModel):
    settings: _Settings
    reference: _Reference | None = None


class _Table(BaseModel):
    count: int
    rows: list[_Row]
    made_with: _MadeWith
    places: dict[str, str]
    warning: str = ""

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if self.made_with.reference is not None and "reference" not in self.places:
            raise ValueError("places says nothing of the reference")
        return self


class _Protocol(BaseModel):
    images: int = 0
    reconstructions: int = 0
    step: int = 0


class _Document(BaseModel):
    """The form of a result; entries that nothing here reads may be of any kind."""

    protocol: _Protocol
    tables: dict[str, _Table]


def write(
    folder: Path, protocol: Mapping[str, Any], settings: EvaluationSettings, tables: Mapping[str, Result]
) -> dict[str, Any]:
    """Adds tables to the result of a folder, in place of those of the same names; returns the document."""
    path = folder / NAME
    with locked(folder):
        known = read(folder)
        documents = {name: {**result.document(), "places": _places(settings)} for name, result in tables.items()}
        document = {
            "made_by": f"daguerre {__version__}",
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "protocol": dict(protocol),
            "software": software(),
            "tables": known.get("tables", {}) | documents,
        }
        write_json_atomically(path, document)
    return document


def has(folder: Path, settings: EvaluationSettings) -> bool:
    """True if the result of a folder has a table of each metric, with its settings, networks and reference."""
    tables = read(folder).get("tables", {}).values()
    return all(any(_is_of(body, metric, settings) for body in tables) for metric in settings.metrics.values())


def _is_of(body: Mapping[str, Any], metric: MetricSettings, settings: EvaluationSettings) -> bool:
    made_with = body.get("made_with", {})
    if made_with.get("settings") != metric.model_dump(mode="json") or body.get("places") != _places(settings):
        return False
    reference = made_with.get("reference")
    return reference is None or reference["sha256"] == sha256(Path(body["places"]["reference"]))


def _places(settings: EvaluationSettings) -> dict[str, str]:
    """The places of networks and reference; that of the reference absolute, as comparisons read it from anywhere."""
    found: dict[str, str] = {name: place.path for name, place in settings.networks.items()}
    if settings.reference is not None:
        found["reference"] = str(Path(settings.reference).expanduser().absolute())
    return found


def software() -> dict[str, str]:
    """Versions that numbers depend on."""
    own = {"daguerre": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return own | {name: version(name) for name in ("diffusers", "transformers", "pillow")}


def read(folder: Path) -> dict[str, Any]:
    """The result of a folder; empty before the first. UserError for a damaged one."""
    path = folder / NAME
    try:
        found = documents.read_object(path)
        _Document.model_validate(found, strict=True)  # it is read as it stands: 2 is no "2"
        return found
    except FileNotFoundError:
        return {}
    except ValidationError as error:
        reason = documents.first_fault(error)
    except ValueError as error:
        reason = str(error)
    raise UserError(f"{path} is damaged ({reason}): remove it, and evaluate again", code="damaged")
