"""Files of additions to layers in the names of kohya's sd-scripts (and of LyCORIS), which ComfyUI and A1111 read.

A module is `lora_unet_` and its path with underscores for dots, of SDXL's UNet the path of the original layout; text
encoders are `lora_te_`, or `lora_te1_` and `lora_te2_`. Stable Cascade has `lora_prior_unet_` and `lora_prior_te_`
(families/cascade/lora_names.py). Programs multiply an addition by alpha / rank, and some take one alpha for all
modules: every module of a file has the same one here, and the rest of its strength is multiplied into one of its
factors.
Sources: kohya-ss/sd-scripts networks/lora.py; KohakuBlueleaf/LyCORIS; Comfy-Org/ComfyUI comfy/lora.py.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from daguerre.checkpoint.atomic import write_durably
from daguerre.checkpoint.safetensors import encode
from daguerre.errors import UserError
from daguerre.formatting import counted
from daguerre.models.export.about import UNKNOWN, About
from daguerre.models.lora_files import fusing, header
from daguerre.models.lora_files.addition import ALPHA, COLUMNS, DIFF, DOWN, MAGNITUDE, UP, Addition, stored
from daguerre.models.network import facts_of
from daguerre.models.weights import seals

NAMES = {DOWN: "lora_down.weight", UP: "lora_up.weight"}
"""Factors that sd-scripts calls otherwise than peft."""


def has_names(network: nn.Module) -> bool:
    """True of networks for whose layers sd-scripts has names."""
    return facts_of(network).names is not None


def notices(networks: Mapping[str, nn.Module], additions: Mapping[str, list[Addition]]) -> list[str]:
    """A line where a file with kohya's names of these additions has less effect in diffusers, which says it by a
    warning alone."""
    found = []
    for component, own in additions.items():
        network, layers = networks[component], {each.layer for each in own}
        patterns = facts_of(network).unknown_to_diffusers
        lost = [layer for layer in sorted(layers) if any(fnmatchcase(layer, pattern) for pattern in patterns)]
        if lost:
            which = f"{lost[0]} and {counted(len(lost) - 1, 'more layer')}" if len(lost) > 1 else lost[0]
            found.append(
                "this file is for ComfyUI and kohya's scripts. Give diffusers the one with diffusers' names: with "
                f"kohya's it would find no {'layer' if len(lost) == len(layers) else which} of "
                f"{type(network).__name__}, and go on without, with a warning alone "
                "(docs/trouble.md#no-effect-in-comfyui)"
            )
    return found


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
        # Of one type, such as that of the file that they were read from. A strength is multiplied in in float32.
        types = {value.dtype for each in own for value in each.factors.values()}
        dtype = types.pop() if len(types) == 1 else torch.float32
        for name, each in _fused(component, networks, [each.to(torch.float32) for each in own]):
            is_norm = not isinstance(networks[component].get_submodule(each.layer), nn.Linear | nn.Conv2d)
            for factor, value in _named(each, alpha, is_norm).items():
                tensors[f"{name}.{factor}"] = stored(value, dtype)
    metadata = header.modelspec(networks, about) | header.kohya(networks, main, alpha, about)
    write_durably(path, encode(seals.finite(tensors), metadata | header.hashes(tensors, metadata)))


def _check(component: str, network: nn.Module, additions: list[Addition]) -> None:
    if not has_names(network):
        raise UserError(f"kohya's layout has no names for {component}, a {type(network).__name__}", code="unsupported")
    if any({MAGNITUDE, COLUMNS} & each.factors.keys() for each in additions):
        raise UserError(
            "DoRA cannot be written in kohya's layout: programs divide by the norms of other rows. Write "
            "format=diffusers, or merge it into a model",
            code="unsupported",
        )


def _fused(
    component: str, networks: Mapping[str, nn.Module], additions: list[Addition]
) -> Iterator[tuple[str, Addition]]:
    """The additions by kohya's names: those to the parts of a fused projection as one to the whole of it."""
    network = networks[component]
    names = facts_of(network).names
    assert names is not None, "`write` has checked it"
    of_layer: dict[str, list[Addition]] = {}
    for each in additions:
        of_layer.setdefault(each.layer, []).append(each)
    for name, parts in names.kohya(component, networks, [*of_layer]).items():
        if len(parts) > 1:
            yield from ((name, each) for each in fusing.joined(network, parts, of_layer))
        else:
            swapped = parts[0] in names.swapped
            yield from ((name, fusing.swapped(each) if swapped else each) for each in of_layer.get(parts[0], ()))


def _named(addition: Addition, alpha: float, is_norm: bool) -> dict[str, Tensor]:
    """Factors by kohya's names, such that alpha / rank times their product is what is added; sums by LyCORIS' names."""
    if DIFF in addition.factors:
        of_norm = "w_norm" if addition.tensor == "weight" else "b_norm"
        of_layer = "diff" if addition.tensor == "weight" else "diff_b"
        return {of_norm if is_norm else of_layer: addition.factors[DIFF] * addition.scale}
    given = addition.scale * addition.rank / alpha if addition.rank else addition.scale
    found = {name: value * given if name == addition.strong else value for name, value in addition.factors.items()}
    return {NAMES.get(name, name): value for name, value in found.items()} | {ALPHA: torch.tensor(alpha)}
