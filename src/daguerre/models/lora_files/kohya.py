"""Files of additions to layers in the names of kohya's sd-scripts (and of LyCORIS), which ComfyUI and A1111 read.

A module is `lora_unet_` and its path with underscores for dots, of SDXL's UNet the path of the original layout; text
encoders are `lora_te_`, or `lora_te1_` and `lora_te2_`. Stable Cascade has `lora_prior_unet_` and `lora_prior_te_`
(models/cascade/lora_names.py). Programs multiply an addition by alpha / rank, and some take one alpha for all modules:
every module of a file has the same one here, and the rest of its strength is multiplied into one of its factors.
Sources: kohya-ss/sd-scripts networks/lora.py; KohakuBlueleaf/LyCORIS; Comfy-Org/ComfyUI comfy/lora.py.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from daguerre.checkpoint.atomic import write_durably
from daguerre.checkpoint.safetensors import encode
from daguerre.errors import UserError
from daguerre.models.cascade import lora_names
from daguerre.models.export.about import UNKNOWN, About
from daguerre.models.lora_files import header
from daguerre.models.lora_files.addition import ALPHA, COLUMNS, DIFF, DOWN, MAGNITUDE, UP, Addition
from daguerre.models.single_file import keys

PROJECTION = "text_projection"
"""The layer of a text encoder that stands beside its transformer, and so has no `text_model` in its name."""
NAMES = {DOWN: "lora_down.weight", UP: "lora_up.weight"}
"""Factors that sd-scripts calls otherwise than peft."""


def has_names(network: nn.Module) -> bool:
    """True of networks for whose layers sd-scripts has names."""
    known = ("UNet2DConditionModel", "CLIPTextModel", "CLIPTextModelWithProjection", lora_names.CLASS)
    return type(network).__name__ in known


def write(
    path: Path, networks: Mapping[str, nn.Module], additions: Mapping[str, list[Addition]], about: About = UNKNOWN
) -> None:
    """Writes a file of the additions of each component. UserError for DoRA, and for networks without names there.

    Args:
        networks: all components of the model, without additions of their own.
    """
    main = next(iter(additions.values()))
    alpha = next((each.scale * each.rank for each in main if each.rank), 1.0)
    tensors: dict[str, Tensor] = {}
    for component, own in additions.items():
        _check(component, networks[component], own)
        names = module_names(component, networks, [each.layer for each in own])
        for each in own:
            is_norm = not isinstance(networks[component].get_submodule(each.layer), nn.Linear | nn.Conv2d)
            for name, value in _named(each, alpha, is_norm).items():
                tensors[f"{names[each.layer]}.{name}"] = value.detach().to("cpu", torch.float32)
    metadata = header.kohya(networks, main, alpha, about) | header.modelspec(networks, about)
    write_durably(path, encode(tensors, metadata | header.hashes(tensors, metadata)))


def _check(component: str, network: nn.Module, additions: list[Addition]) -> None:
    if not has_names(network):
        raise UserError(f"kohya's layout has no names for {component}, a {type(network).__name__}", code="unsupported")
    if any({MAGNITUDE, COLUMNS} & each.factors.keys() for each in additions):
        raise UserError(
            "DoRA cannot be written in kohya's layout: programs divide by the norms of other rows. Write "
            "format=diffusers, or merge it into a model",
            code="unsupported",
        )


def module_names(component: str, networks: Mapping[str, nn.Module], layers: Iterable[str]) -> dict[str, str]:
    """kohya's name of each layer of a component."""
    texts = sorted(name for name in networks if name.startswith("text_encoder"))
    if component in texts:
        cascade = any(map(lora_names.is_one, networks.values()))
        prefix = f"te{texts.index(component) + 1}" if len(texts) > 1 else "prior_te" if cascade else "te"
        paths = {layer: layer if layer == PROJECTION else keys.with_wrapper(layer) for layer in layers}
    elif lora_names.is_one(networks[component]):
        prefix = lora_names.prefix(networks[component]).removeprefix("lora_")
        paths = {layer: lora_names.path(networks[component], layer) for layer in layers}
    elif header.is_sdxl(networks):
        prefix, original = "unet", original_names(networks[component])
        paths = {layer: original[layer] for layer in layers}
    else:
        prefix, paths = "unet", {layer: layer for layer in layers}
    return {layer: f"lora_{prefix}_{path.replace('.', '_')}" for layer, path in paths.items()}


def original_names(unet: nn.Module) -> dict[str, str]:
    """Names of a UNet's layers in the original layout (SGM's)."""
    kinds = nn.Linear | nn.Conv2d | nn.LayerNorm | nn.GroupNorm
    weights = [f"{name}.weight" for name, layer in unet.named_modules() if isinstance(layer, kinds)]
    links = keys.unet(weights)
    return {link.names[0].removesuffix(".weight"): link.original.removesuffix(".weight") for link in links}


def _named(addition: Addition, alpha: float, is_norm: bool) -> dict[str, Tensor]:
    """Factors by kohya's names, such that alpha / rank times their product is what is added; sums by LyCORIS' names."""
    if DIFF in addition.factors:
        of_norm = "w_norm" if addition.tensor == "weight" else "b_norm"
        of_layer = "diff" if addition.tensor == "weight" else "diff_b"
        return {of_norm if is_norm else of_layer: addition.factors[DIFF] * addition.scale}
    given = addition.scale * addition.rank / alpha if addition.rank else addition.scale
    found = {name: value * given if name == addition.strong else value for name, value in addition.factors.items()}
    return {NAMES.get(name, name): value for name, value in found.items()} | {ALPHA: torch.tensor(alpha)}
