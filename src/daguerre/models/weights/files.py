"""Weights and configs in folders of diffusers and transformers: reads them, and writes them in another dtype."""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from daguerre import documents
from daguerre.checkpoint.safetensors import Later
from daguerre.errors import UserError, named
from daguerre.models.weights import beside, seals
from daguerre.models.weights.opening import opened

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_STEMS = ("diffusion_pytorch_model", "model")
_VARIANT = re.compile(r"\w+\.(\w+)(?:-\d+-of-\d+)?\.safetensors|\w+\.safetensors\.index\.(\w+)\.json")
_TEXTS = (".json", ".txt", ".md", ".model")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. UserError for a file that is not there or damaged."""
    try:
        found = documents.read_object(path)
        if path.name == "config.json":
            documents.check_counts(found)
        return found
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}. Copy the whole folder again", code="damaged") from error


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """A JSON object as diffusers writes it."""
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def read_file(path: Path) -> dict[str, Tensor]:
    """All tensors of a file by name, mapped from it."""
    with opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def write_compared(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes tensors on the CPU and a header with their digest, and reads them back. OSError where the file holds
    others, to the bit."""
    seals.write(path, tensors, metadata)
    found = read_file(path)
    if lost := [name for name, tensor in tensors.items() if not torch.equal(found[name], tensor)]:
        raise OSError(f"{path} holds other weights than were written: {', '.join(lost[:3])}")


def read(folder: Path, variant: str | None = None, ignored: Sequence[str] = ()) -> dict[str, Tensor]:
    """All weights of one network by name, mapped from its file or its shards. `ignored` are patterns of tensors that
    are left out. UserError where there are none, or where a quantiser left others with them."""
    found = weight_files(folder, variant)
    if not found:
        there = variants(folder)
        hint = f": it has the variant {' and '.join(there)}: set variant={there[0]}" if there else ""
        raise UserError(f"{folder} has no weights in safetensors{hint}", code="missing", setting="variant")
    # By the config: codes look like weights of a type of few bits.
    check_whole(folder)
    for path in found:
        seals.check(path, large=True)
    tensors = {name: tensor for path in found for name, tensor in read_file(path).items()}
    kept, _ = beside.without(tensors, ignored)
    beside.check_names(folder, kept)
    return kept


def check_whole(folder: Path) -> None:
    """UserError for a network whose config says that its weights are quantised."""
    path = folder / "config.json"
    form = read_json(path).get("quantization_config") if path.is_file() else None
    if form is not None:
        name = form.get("quant_method") if isinstance(form, dict) else None
        raise UserError(
            f"{folder} has quantised weights ({name or 'quantization_config in its config.json'}), which cannot be "
            "read here: use a copy with whole weights, such as float16 or bfloat16",
            code="unsupported",
        )


def check_numbers(folder: Path, variant: str | None, ignored: Sequence[str] = ()) -> None:
    """UserError for the weights of a network that are no numbers of their own: integers, or what a quantiser left with
    others, by the names and types in the headers. Patterns of names that are left out are `ignored`."""
    forms: dict[str, str] = {}
    for path in weight_files(folder, variant):
        with opened(path) as file:
            forms |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    forms, _ = beside.without(forms, ignored)
    beside.check_names(folder, forms)
    odd = sorted(name for name, form in forms.items() if name.endswith(".weight") and form[0] in "IU")
    if odd:
        beside.refuse_integers(folder, odd, forms[odd[0]])


def weight_files(folder: Path, variant: str | None) -> list[Path]:
    """The file of a network's weights, or the shards that an index names; [] if there are none. Those of the variant
    where the network has it, else the plain ones."""
    for mark in (f".{variant}", "") if variant else ("",):
        for stem in _STEMS:
            if (whole := folder / f"{stem}{mark}.safetensors").is_file():
                return [whole]
            if (index := folder / f"{stem}.safetensors.index{mark}.json").is_file():
                return shards(index)
    return []


def variants(folder: Path) -> list[str]:
    """The variants, such as `fp16`, of the weights in the folder of a network."""
    names = [path.name for path in folder.glob("*.*") if path.name.partition(".")[0].partition("-")[0] in _STEMS]
    found = (_VARIANT.fullmatch(name) for name in names)
    return sorted({match[1] or match[2] for match in found if match})


def check_variant(variant: str | None, *models: Path) -> None:
    """UserError for a variant that no network of these folders has."""
    folders = [folder for model in models for folder in (model, *model.iterdir())]
    known = sorted({name for folder in folders for name in variants(folder)})
    if variant is not None and variant not in known:
        raise UserError(
            f"no network of {' or '.join(map(str, models))} has weights of the variant {variant!r}; it has the "
            f"variants: {', '.join(known) or 'none'}",
            code="missing",
            setting="variant",
        )


def shards(index: Path) -> list[Path]:
    """The files that an index of weights names. UserError for an index that is damaged or leads elsewhere."""
    try:
        names = sorted(set(documents.read_object(index)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index} cannot be read as an index of weights: {error!r}. Copy the file again", code="damaged"
        ) from error
    # An index must not lead out of its folder.
    if odd := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise UserError(f"{index} names {odd[0]!r}, which does not exist: use another copy", code="damaged")
    return [index.with_name(name) for name in names]


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor | Later:
    """The tensor in another dtype, converted when it is written. None and integer tensors leave it as it is."""
    if dtype is None or tensor.dtype == dtype or not tensor.dtype.is_floating_point:
        return tensor
    # Converted while it is written: a second copy of a large network may have no room.
    return Later(dtype, tuple(tensor.shape), partial(tensor.to, dtype))


def _changed(make: Callable[[], Tensor] | None, tensor: Tensor, dtype: torch.dtype | None) -> Tensor | Later:
    if make is None:
        return cast(tensor, dtype)
    to = dtype or tensor.dtype
    return Later(to, tuple(tensor.shape), lambda: _in_range(make(), to))


def _in_range(made: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype. UserError where that makes a number infinite."""
    found = made.to(dtype)
    # A weight that was infinite before is not this conversion's fault.
    if torch.isfinite(made).all() and not torch.isfinite(found.float()).all():
        raise UserError(
            f"a changed weight has values up to {made.abs().max():.3g}, above the limit of "
            f"{str(dtype).removeprefix('torch.')}: choose another dtype, such as bfloat16, or less strength",
            setting="dtype",
        )
    return found


def check_range(tensors: Mapping[str, Tensor], dtype: torch.dtype | None, what: object) -> None:
    """UserError where float16 would make weights infinite."""
    if dtype is not torch.float16:
        return
    limit = torch.finfo(dtype).max
    for name, tensor in tensors.items():
        wider = tensor.dtype.is_floating_point and torch.finfo(tensor.dtype).max > limit
        # NaN and infinity of the file itself are found when they are written.
        if wider and tensor.numel() and torch.finfo(tensor.dtype).max >= tensor.abs().amax() > limit:
            raise UserError(
                f"{what}: {name} has values above float16's limit of {limit:.0f}: choose dtype=bfloat16 or float32",
                setting="dtype",
            )


Change = Callable[[str, str, Tensor], Callable[[], Tensor] | None]
"""(component, name, weight) -> what makes the weight that is written in its place, or None for the weight itself."""


def recast(
    source: Path,
    fresh: Path,
    dtype: torch.dtype | None,
    variant: str | None = None,
    change: Change = lambda component, name, weight: None,
    ignored: Sequence[str] = (),
) -> None:
    """Fills the empty folder `fresh` with a pipeline or a network: one file of weights each, in another dtype, and with
    other weights where `change` makes some; one is in memory at a time."""
    for folder in [source, *sorted(inner for inner in source.iterdir() if inner.is_dir())]:
        made = fresh / folder.relative_to(source)
        made.mkdir(exist_ok=True)
        for path in sorted(path for path in folder.iterdir() if path.suffix in _TEXTS):
            # What is written is one file: an index of the old shards would lead nowhere.
            if ".safetensors.index" not in path.name:
                shutil.copyfile(path, made / path.name)
        if weight_files(folder, variant) or variants(folder):
            tensors = read(folder, variant, ignored)
            check_range(tensors, dtype, folder)
            name = f"{weight_files(folder, variant)[0].name.partition('.')[0].partition('-')[0]}.safetensors"
            written = {key: _changed(change(folder.name, key, own), own, dtype) for key, own in tensors.items()}
            with named(str(folder)):
                seals.write(made / name, written)
            config = read_json(made / "config.json")
            if dtype is not None and (own := {"dtype", "torch_dtype"} & config.keys()):
                write_json(made / "config.json", config | dict.fromkeys(own, str(dtype).removeprefix("torch.")))
