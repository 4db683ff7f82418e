"""Weights in folders of diffusers and transformers as they lie on disk: read, and written in another type."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from daguerre.checkpoint.atomic import write_durably
from daguerre.checkpoint.tensors import Later, encode
from daguerre.errors import UserError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_STEMS = ("diffusion_pytorch_model", "model")


def read(folder: Path, variant: str | None = None) -> dict[str, Tensor]:
    """All weights of one network by name, mapped from its files, of which large networks have several."""
    mark = f".{variant}" if variant else ""
    for stem in _STEMS:
        if (whole := folder / f"{stem}{mark}.safetensors").is_file():
            return dict(_tensors(whole))
        if (index := folder / f"{stem}.safetensors.index{mark}.json").is_file():
            shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            return {name: tensor for shard in shards for name, tensor in _tensors(folder / shard)}
    raise UserError(f"{folder} has no weights in safetensors" + (f" of the variant {variant!r}" if variant else ""))


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, "pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}. Copy it anew") from error


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor | Later:
    """The tensor in another type, made when it is written; None, and what is no fraction, leaves it as it is."""
    if dtype is None or tensor.dtype == dtype or not tensor.dtype.is_floating_point:
        return tensor
    return Later(dtype, tuple(tensor.shape), partial(tensor.to, dtype))


def overflowing(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> list[str]:
    """Names of finite weights that float16 has no number for."""
    if dtype is not torch.float16:
        return []
    limit = torch.finfo(dtype).max
    return [name for name, t in tensors.items() if t.dtype.is_floating_point and t.numel() and t.abs().amax() > limit]


def recast(source: Path, fresh: Path, dtype: torch.dtype) -> None:
    """Fills the empty folder `fresh` with a pipeline or a network whose weights are of another type."""
    for path in sorted(source.rglob("*")):
        made = fresh / path.relative_to(source)
        if path.is_dir():
            made.mkdir()
        elif path.suffix == ".safetensors":
            tensors = dict(_tensors(path))
            refuse_overflow(tensors, dtype, path)
            write_durably(made, encode({name: cast(tensor, dtype) for name, tensor in tensors.items()}))
        elif path.name == "config.json" or ".safetensors.index" in path.name:
            made.write_text(json.dumps(_retyped(json.loads(path.read_bytes()), dtype), indent=2) + "\n")
        else:
            shutil.copyfile(path, made)


def refuse_overflow(tensors: Mapping[str, Tensor], dtype: torch.dtype | None, what: object) -> None:
    """UserError where float16 would make weights infinite."""
    if names := overflowing(tensors, dtype):
        raise UserError(f"{what}: {names[0]} has values above float16's {65504}: choose dtype=bfloat16 or float32")


def _retyped(document: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A config that names its type names the new one; an index forgets the size that it had."""
    own = {key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in document}
    if "weight_map" in document:
        return {**document, "metadata": {}}
    return document | own
