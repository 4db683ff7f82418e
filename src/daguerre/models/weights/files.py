"""Weights in folders of diffusers and transformers as they lie on disk: read, and written in another type."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from daguerre.checkpoint.atomic import write_durably
from daguerre.checkpoint.safetensors import Later, encode
from daguerre.errors import UserError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_STEMS = ("diffusion_pytorch_model", "model")
_TEXTS = (".json", ".txt", ".md", ".model")


def read(folder: Path, variant: str | None = None) -> dict[str, Tensor]:
    """All weights of one network by name, mapped from its files, of which large networks have several."""
    found = _files(folder, variant)
    if not found:
        raise UserError(f"{folder} has no weights in safetensors" + (f" of the variant {variant!r}" if variant else ""))
    return {name: tensor for path in found for name, tensor in _tensors(path)}


def _files(folder: Path, variant: str | None) -> list[Path]:
    """The files of a network's weights: one, or the shards that an index names; [] if there are none."""
    mark = f".{variant}" if variant else ""
    for stem in _STEMS:
        if (whole := folder / f"{stem}{mark}.safetensors").is_file():
            return [whole]
        if (index := folder / f"{stem}.safetensors.index{mark}.json").is_file():
            return shards(index)
    return []


def shards(index: Path) -> list[Path]:
    """The files that an index of weights names, beside it. UserError for one that is damaged or leads elsewhere."""
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} cannot be read as an index of weights: {error!r}. Copy it anew") from error
    if odd := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise UserError(f"{index} names {odd[0]!r}, which is no file beside it: take another copy")
    return [index.with_name(name) for name in names]


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


def recast(source: Path, fresh: Path, dtype: torch.dtype | None, variant: str | None = None) -> None:
    """Fills the empty folder `fresh` with a pipeline or a network: its weights in one file each, of another type."""
    for folder in [source, *sorted(inner for inner in source.iterdir() if inner.is_dir())]:
        made = fresh / folder.relative_to(source)
        made.mkdir(exist_ok=True)
        for path in sorted(path for path in folder.iterdir() if path.suffix in _TEXTS):
            if ".safetensors.index" not in path.name:
                shutil.copyfile(path, made / path.name)
        if any(_files(folder, which) for which in (None, variant)):
            tensors = read(folder, variant)
            refuse_overflow(tensors, dtype, folder)
            name = f"{_files(folder, variant)[0].name.partition('.')[0].partition('-')[0]}.safetensors"
            write_durably(made / name, encode({key: cast(tensor, dtype) for key, tensor in tensors.items()}))
            _retype(made / "config.json", dtype)


def refuse_overflow(tensors: Mapping[str, Tensor], dtype: torch.dtype | None, what: object) -> None:
    """UserError where float16 would make weights infinite."""
    if names := overflowing(tensors, dtype):
        raise UserError(f"{what}: {names[0]} has values above float16's {65504}: choose dtype=bfloat16 or float32")


def _retype(config: Path, dtype: torch.dtype | None) -> None:
    """A config that names its type names the new one."""
    document = json.loads(config.read_bytes())
    if dtype is not None and (own := {"dtype", "torch_dtype"} & document.keys()):
        document |= dict.fromkeys(own, str(dtype).removeprefix("torch."))
        config.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
