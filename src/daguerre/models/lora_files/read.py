"""Reads files of LoRA and its kin: diffusers' and peft's, kohya's and LyCORIS', whatever program wrote them.

Every tensor of a file is applied, with the strength that the file's writer gave it, or the file is refused with what is
wrong: a layer that the model does not have, a factor that is missing, a shape of another model, a number that is none.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.models.lora_files import kohya
from daguerre.models.lora_files.addition import (
    DIFFUSERS_FILE,
    DOWN,
    KOHYA_FILE,
    MAGNITUDE,
    METADATA,
    MIDDLE,
    UP,
    Addition,
)
from daguerre.models.single_file.keys import with_wrapper

_SPELLINGS = {
    ".lora_down.weight": DOWN,
    ".lora_up.weight": UP,
    ".lora_mid.weight": MIDDLE,
    ".lora_A.weight": DOWN,
    ".lora_B.weight": UP,
    ".lora_A.default.weight": DOWN,
    ".lora_B.default.weight": UP,
    ".lora.down.weight": DOWN,
    ".lora.up.weight": UP,
    ".lora_linear_layer.down.weight": DOWN,
    ".lora_linear_layer.up.weight": UP,
    "_lora.down.weight": DOWN,
    "_lora.up.weight": UP,
    ".lora_magnitude_vector.weight": MAGNITUDE,
    ".lora_magnitude_vector": MAGNITUDE,
    **{f".{name}": name for name in ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")},
    **{f".{name}": name for name in ("lokr_t2", "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1")},
    ".hada_t2": "hada_t2",
    ".alpha": kohya.ALPHA,
}
"""Ends of tensors' names, and the factors that they are."""
_WHOLE = ({DOWN, UP}, {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"})
_REFUSED = {
    ".dora_scale": "DoRA in LyCORIS' layout, which divides by the norms of other rows: merge it with its own trainer",
    ".diff": "differences of whole weights (LyCORIS full)",
    ".oft_blocks": "an OFT, which is not supported",
    "emb_params": "an embedding, not a LoRA",
}
_PROCESSOR = re.compile(r"\.processor\.(to_[qkv]|to_out)$")
"""Layers of attention in files of older versions of diffusers."""


def read(path: Path, networks: Mapping[str, nn.Module]) -> dict[str, list[Addition]]:
    """The additions of a file, or of a folder that holds one, by component and the networks' layers.

    Args:
        networks: all components of the model, without additions of their own.

    Raises:
        UserError: for a file that is not wholly understood, or made for another model.
    """
    tensors, metadata = _tensors(find(path))
    layers = _layers(networks)
    modules: dict[tuple[str, str], dict[str, Tensor]] = {}
    unknown: list[str] = []
    for name, value in tensors.items():
        stem, factor = _parted(name, path)
        place = layers.get(stem)
        if place is None:
            unknown.append(stem)
            continue
        if not torch.isfinite(value).all():
            raise UserError(f"{path}: {name} has NaN or infinity in it", code="damaged")
        modules.setdefault(place, {})[factor] = value
    if unknown:
        raise UserError(_lost(path, sorted({*unknown}), layers), code="unknown")
    found: dict[str, list[Addition]] = {}
    numbers = _numbers(path, metadata)
    for (component, layer), factors in modules.items():
        addition = _addition(path, component, layer, factors, numbers)
        _check_shape(path, component, addition, networks[component])
        found.setdefault(component, []).append(addition)
    if not found:
        raise UserError(f"{path} has no additions in it", code="empty")
    return found


def find(path: Path) -> Path:
    """The file of a LoRA: itself, or the one in a run's folder or in what it exports. UserError if there is none."""
    if not path.is_dir():
        if not path.is_file():
            raise UserError(f"{path}: there is no such file", code="missing")
        return path
    for place in (path, path / "adapter", path / "pipeline"):  # runs of older versions have it in pipeline/
        inner = sorted(each for each in place.iterdir() if each.is_dir()) if place.is_dir() and place != path else []
        found = [file for folder in (place, *inner) if (file := _in(folder))]
        if len(found) > 1:
            raise UserError(
                f"{path} holds several LoRAs: give one of {', '.join(str(file.parent) for file in found)}",
                code="conflict",
            )
        if found:
            return found[0]
    raise UserError(f"{path} holds no LoRA: give a .safetensors file, or the folder of a LoRA's run", code="missing")


def _in(folder: Path) -> Path | None:
    """The file of a LoRA in a folder of a run; kohya's first, whose strength every program reads alike."""
    return next((folder / name for name in (KOHYA_FILE, DIFFUSERS_FILE) if (folder / name).is_file()), None)


def _tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if path.suffix != ".safetensors":
        raise UserError(f"{path}: only .safetensors files are read: others can run code when they are opened")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}", code="damaged") from error


def _parted(name: str, path: Path) -> tuple[str, str]:
    """Name of the module, as the file has it, and the factor that a tensor is."""
    for mark, why in _REFUSED.items():
        if name.endswith(mark) or name.startswith(mark):
            raise UserError(f"{path} has {name}: {why}", code="unsupported")
    ending = next((each for each in sorted(_SPELLINGS, key=len, reverse=True) if name.endswith(each)), None)
    if ending is None:
        raise UserError(f"{path} has {name}, which is no part of a LoRA, LoHa or LoKr", code="unknown")
    stem = name.removesuffix(ending).removeprefix("base_model.model.")
    stem = _PROCESSOR.sub(lambda match: f".{match[1]}{'.0' if match[1] == 'to_out' else ''}", stem)
    return stem, _SPELLINGS[ending]


def _layers(networks: Mapping[str, nn.Module]) -> dict[str, tuple[str, str]]:
    """(component, layer) by every name that a file may have for it."""
    found: dict[str, tuple[str, str]] = {}
    for component, network in networks.items():
        own = [name for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
        for layer in own:
            for spelling in (layer, layer.removeprefix("text_model."), with_wrapper(layer)):
                found[f"{component}.{spelling}"] = component, layer
        if kohya.has_names(network):
            for name, layer in _kohya_names(component, networks, own):
                found[name] = component, layer
    return found


def _kohya_names(component: str, networks: Mapping[str, nn.Module], layers: list[str]) -> Iterable[tuple[str, str]]:
    """Names of sd-scripts and the layer of each; of SDXL's UNet in both spellings."""
    for layer, name in kohya.module_names(component, networks, layers).items():
        yield name, layer
        if name.startswith("lora_unet_"):
            yield f"lora_unet_{layer.replace('.', '_')}", layer


def _lost(path: Path, unknown: list[str], layers: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(unknown[0], layers, n=2)
    hint = f"; the nearest are {', '.join(near)}" if near else ""
    return (
        f"{path} was made for another model: this one has no {unknown[0]} "
        f"({len(unknown):,} of the file's modules are unknown{hint})"
    )


def _numbers(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """peft's configs in the header, by component; empty where there are none."""
    try:
        found = json.loads(metadata.get(METADATA, "{}"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path}: {METADATA} in its header is not a JSON object", code="damaged")
    return found


def _addition(path: Path, component: str, layer: str, factors: dict[str, Tensor], numbers: Any) -> Addition:
    """One layer's, with the scale that the file gives it: alpha / rank, of files without alpha 1."""
    given = factors.pop(kohya.ALPHA, None)
    names = factors.keys() - {MAGNITUDE, MIDDLE, "hada_t1", "hada_t2"}
    has_kronecker = {"lokr_w1", "lokr_w1_b"} & names and {"lokr_w2", "lokr_w2_b"} & names
    if names not in _WHOLE and not has_kronecker:
        raise UserError(f"{path}: {component}.{layer} has only {', '.join(sorted(names))}: parts are missing")
    plain = Addition(layer, factors, 1.0)
    if given is not None:
        return Addition(layer, factors, float(given) / plain.rank if plain.rank else 1.0)
    own = {key.removeprefix(f"{component}."): v for key, v in numbers.items() if key.startswith(f"{component}.")}
    return Addition(layer, factors, _scale_of(own, layer, plain.rank)) if own and plain.rank else plain


def _scale_of(numbers: Mapping[str, Any], layer: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank), as peft's config says."""
    alpha = numbers.get("lora_alpha", numbers.get("alpha", rank))
    for pattern, own in (numbers.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", layer) or re.fullmatch(rf"(.*\.)?({pattern})", with_wrapper(layer)):
            alpha = own
            break
    return float(alpha) / (rank**0.5 if numbers.get("use_rslora") else rank)


def _check_shape(path: Path, component: str, addition: Addition, network: nn.Module) -> None:
    layer = network.get_submodule(addition.layer)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    expected = tuple(weight.shape)
    try:
        addition.to("meta").weight(torch.empty(expected, device="meta"))
    except RuntimeError:
        shapes = {name: tuple(value.shape) for name, value in addition.factors.items()}
        raise UserError(
            f"{path} was made for another model: {component}.{addition.layer} is {expected} here, and the file has "
            f"{shapes} for it",
            code="unsupported",
        ) from None
