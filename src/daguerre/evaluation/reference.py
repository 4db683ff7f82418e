"""Reference statistics: features of a data set's images, with digests of what they were made of and with.

One safetensors file: for each feature network, by its label, the features [n, d] float32 in the order of samples, and
mean and covariance float64. Its header says which data, how many samples, which frame, which networks, which software,
and has a digest of each tensor and of itself, which are checked when they are read (files of versions before 0.2 have
none).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from daguerre import __version__, documents
from daguerre.checkpoint.atomic import write_bytes_atomically
from daguerre.data.tools.manifest import signed
from daguerre.errors import UserError
from daguerre.evaluation.formulas import frechet
from daguerre.evaluation.formulas.frechet import Moments
from daguerre.models.weights.file_digests import sha256
from daguerre.regular import check_regular

_KEY = "daguerre_reference"
_DIGESTS = "tensors"
_FORMER = {"made_by", "data", "networks"}
"""All that versions before 0.2 wrote, without digests."""


class _Data(BaseModel):
    images: int = Field(ge=2)


class _Header(BaseModel):
    """The form of a header; entries that nothing here reads may be of any kind."""

    data: _Data
    networks: dict[str, Any]
    tensors: dict[str, str] = {}


def write(path: Path, made_of: Mapping[str, Any], networks: Mapping[str, Mapping[str, Any]], features: Any) -> None:
    """Writes the statistics of `features` ([n, d] float32 by label)."""
    tensors: dict[str, np.ndarray] = {}
    for label, rows in features.items():
        found = frechet.moments(rows)
        tensors |= {f"features {label}": rows, f"mean {label}": found.mean, f"covariance {label}": found.covariance}
    document = {"made_by": f"daguerre {__version__}", "data": dict(made_of), "networks": dict(networks)}
    document = signed(document | {_DIGESTS: {name: _digest(tensor) for name, tensor in tensors.items()}})
    write_bytes_atomically(path, save(tensors, {_KEY: json.dumps(document)}))


@dataclass(frozen=True, eq=False)
class Statistics:
    """The statistics of one network in a file."""

    path: Path
    label: str
    document: Mapping[str, Any]

    @property
    def count(self) -> int:
        return int(self.document["data"]["images"])

    @property
    def about(self) -> dict[str, Any]:
        return {"file": self.path.name, "sha256": sha256(self.path), **self.document["data"]}

    def moments(self) -> Moments:
        return self._moments

    def features(self) -> np.ndarray:
        return self._features

    @cached_property
    def _moments(self) -> Moments:
        return Moments(self.count, self._tensor("mean"), self._tensor("covariance"))

    @cached_property
    def _features(self) -> np.ndarray:
        return self._tensor("features")

    def _tensor(self, kind: str) -> np.ndarray:
        name = f"{kind} {self.label}"
        try:
            with safe_open(self.path, "np") as file:
                found: np.ndarray = file.get_tensor(name)
        except SafetensorError as error:
            raise _unread(self.path, str(error)) from error
        if self.document.get(_DIGESTS, {name: _digest(found)}).get(name) != _digest(found):
            raise _unread(self.path, f"{name} is not as it was written: copy the file again, or make it again")
        if not np.isfinite(found).all() or (kind == "features" and len(found) != self.count):
            raise _unread(self.path, f"{name} is not finite, or not of {self.count:,} images")
        return found


def of_file(name: str, label: str) -> Statistics:
    """The statistics of this network. UserError for a file of another kind, or one made with other networks."""
    path = Path(name).expanduser()
    document = read_document(path)
    if label not in document["networks"]:
        raise UserError(
            f"reference={name} has statistics by {', '.join(document['networks'])}, and the metric needs {label}: "
            "other weights or another resize give other numbers. Make it with the same networks: `daguerre reference`",
            code="conflict",
            setting="reference",
        )
    return Statistics(path, label, document)


def read_document(path: Path) -> dict[str, Any]:
    """The header of a file of statistics. UserError for any other file."""
    try:
        check_regular(path)
        with safe_open(path, "np") as file:
            document: dict[str, Any] = documents.parse((file.metadata() or {}).get(_KEY, "null"))
        _Header.model_validate(document, strict=True)
        if document.keys() - _FORMER and signed(document) != document:
            raise _unread(path, "its header is not as it was written: copy the file again, or make it again")
        return document
    except ValidationError as error:
        raise _unread(path, documents.first_fault(error)) from error
    except (OSError, SafetensorError, ValueError) as error:
        raise _unread(path, str(error)) from error


def _digest(tensor: np.ndarray) -> str:
    """xxh3_128 of its type, shape and numbers, hex."""
    whole = xxhash.xxh3_128(f"{tensor.dtype} {tensor.shape}".encode())
    whole.update(np.ascontiguousarray(tensor).data)
    return whole.hexdigest()


def _unread(path: Path, why: str) -> UserError:
    return UserError(
        f"reference={path} cannot be read as statistics that `daguerre reference` wrote: {why}",
        code="missing" if not path.exists() else "damaged",
        setting="reference",
    )
