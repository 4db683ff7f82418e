"""Reads pickled weights (.bin, .ckpt, .pt) as tensors alone, and converts them to safetensors once.

A pickle is a program. torch's own reader of weights runs none of it: it knows tensors, numbers, texts and containers,
and refuses a file at the first other name in it. Two things that old trainers left with the weights (the state of
pytorch_lightning's callbacks, numpy's numbers) are read as nothing.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from daguerre.errors import UserError, named
from daguerre.models.weights import conversion_cache, seals
from daguerre.models.weights.files import read_file, read_json, shards, write_json
from daguerre.regular import check_regular

_WEIGHTS = re.compile(r"(?:diffusion_)?pytorch_model[\w.-]*\.bin")
_SHARDS = re.compile(r"(?:diffusion_)?pytorch_model[\w.-]*\.bin\.index[\w.-]*\.json")
_TEXTS = (".json", ".txt", ".model")
_UNUSED = ("safety_checker", "feature_extractor")


class _Nothing:
    """Stands for an object that is not read."""

    def __new__(cls, *arguments: Any) -> _Nothing:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Takes nothing."""


_LEFT_OUT: list[Any] = [
    (_Nothing, name)
    for name in (
        "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint",
        "pytorch_lightning.callbacks.early_stopping.EarlyStopping",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "numpy.dtype",
    )
]
_REFUSED: Any = torch.serialization.pickle.UnpicklingError


def read(path: Path) -> dict[str, Any]:
    """The top level of a pickled file: tensors by name, or numbers and mappings next to `state_dict`.

    UserError if it holds anything that is no data, or is damaged. Tensors are mapped from the file.
    """
    try:
        check_regular(path)
        with torch.serialization.safe_globals(_LEFT_OUT):
            # Files of before torch 1.6 are no archives, and cannot be mapped.
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except _REFUSED as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error)) or re.search(r"Unsupported \w+ ([\w.]+)", str(error))
        what = f"it contains {named[1]}, which is not a tensor" if named else _first_line(error)
        raise UserError(
            f"{path} is not read: {what}. A pickle can run any code, so only tensors are read, and no code of this "
            "file was run. Use the model's .safetensors, or save only the weights: torch.save(network.state_dict(), "
            "FILE)",
            code="unsupported",
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read as weights saved by torch.save: {_first_line(error)}. Copy the file again",
            code="damaged",
        ) from error
    if not isinstance(found, Mapping):
        raise UserError(f"{path} holds {type(found).__name__}, not weights by name", code="unsupported")
    return {str(name): value for name, value in found.items()}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "it ends too early").splitlines()[0]


def tensors(path: Path) -> dict[str, Tensor]:
    """The weights in a pickled file by name; those of a trainer are under `state_dict`."""
    found: Any = read(path)
    # Some trainers have saved a checkpoint inside a checkpoint.
    while isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    weights = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    if not weights:
        keys = ", ".join(map(str, found)) or "nothing"
        raise UserError(f"{path} has no weights by name; its top-level keys are: {keys}", code="unsupported")
    return weights


def files_of(path: Path) -> list[Path]:
    """The files of weights by any name in a folder, pickled or not; or the one file."""
    found = sorted(path.glob("*.pth")) + sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return [file for file in found if file.is_file()]


def of_place(path: Path) -> dict[str, Tensor] | None:
    """All tensors of these files; None where there is no file."""
    found = [read_file(file) if file.suffix == ".safetensors" else tensors(file) for file in files_of(path)]
    return {name: tensor for own in found for name, tensor in own.items()} if found else None


def folder(path: Path) -> Path:
    """A folder with the same networks in safetensors, made once and kept in the user's cache.

    For a folder in diffusers' layout, or one component of it. Weights that are there in safetensors stay as they are.
    """
    files = _files(path)
    if not any(_is_pickled(file) for file in files):
        return path
    names = ",".join(file.relative_to(path).as_posix() for file in files)
    return conversion_cache.once(files, lambda fresh: convert(path, fresh), names)


def holds(path: Path) -> bool:
    """True if some weights of a folder are there in pickled form alone."""
    return any(_is_pickled(file) for file in _files(path))


def convert(path: Path, fresh: Path) -> None:
    """Writes the networks in `path` into the empty folder `fresh`, their weights in safetensors."""
    print(f"converting the pickled weights of {path} to safetensors, once", file=sys.stderr, flush=True)
    for file in _files(path):
        made = fresh / file.relative_to(path).with_name(_new_name(file.name))
        made.parent.mkdir(exist_ok=True)
        if _WEIGHTS.fullmatch(file.name):
            with named(str(file)):
                seals.write(made, tensors(file))
        elif _SHARDS.fullmatch(file.name):
            shards(file)  # refuses an index that is damaged or leads elsewhere
            index = json.loads(file.read_bytes())
            write_json(made, index | {"weight_map": {k: _new_name(v) for k, v in index["weight_map"].items()}})
        elif file.name == "model_index.json":
            write_json(made, without_unused(read_json(file)))
        else:
            shutil.copyfile(file, made)


def _files(path: Path) -> list[Path]:
    """The files to convert or copy: small text files, and of each weight the .safetensors, or else the .bin."""
    folders = [path, *(inner for inner in sorted(path.iterdir()) if inner.is_dir() and inner.name not in _UNUSED)]
    found = [file for inner in folders for file in sorted(inner.iterdir()) if file.is_file()]
    there = set(found)
    return [
        file
        for file in found
        # Safetensors come before their pickled twin: both are the same weights, and only one of them can run code.
        if (_is_pickled(file) and file.with_name(_new_name(file.name)) not in there)
        or (file.suffix in _TEXTS and not _SHARDS.fullmatch(file.name))
        or (file.suffix == ".safetensors" and (file.parent != path or (path / "config.json") in there))
    ]


def _is_pickled(file: Path) -> bool:
    return bool(_WEIGHTS.fullmatch(file.name) or _SHARDS.fullmatch(file.name))


def _new_name(name: str) -> str:
    """The name in safetensors of a file of weights: `model` of transformers, the same stem of diffusers."""
    if not (_WEIGHTS.fullmatch(name) or _SHARDS.fullmatch(name)):
        return name
    return re.sub(r"^pytorch_model", "model", name).replace(".bin", ".safetensors")


def without_unused(index: dict[str, Any]) -> dict[str, Any]:
    """A pipeline's index that no longer asks for what was left out."""
    left_out = {name: [None, None] for name in _UNUSED if name in index}
    return index | left_out | ({"requires_safety_checker": False} if "safety_checker" in index else {})
