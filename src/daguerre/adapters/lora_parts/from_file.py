"""Additions that start from a file of a LoRA, whatever program wrote it."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from daguerre.adapters.lora_parts.inits import ADAPTER
from daguerre.adapters.lora_parts.layers import wrapped
from daguerre.adapters.lora_parts.noise_ranks import NoiseRanks
from daguerre.errors import UserError
from daguerre.models.lora_files import header, shapes
from daguerre.models.lora_files.addition import Addition
from daguerre.models.lora_files.contents import contents_of, find

_SETTING = "init_from"


def noise_ranks(path: Path, own: NoiseRanks | None) -> list[str]:
    """Messages about a file all ranks of which act, where they do not here. UserError for a T-LoRA with others."""
    theirs = header.tlora(contents_of(find(path)).metadata)
    if theirs and theirs != (own.numbers if own else {}):
        asked = ", ".join(f"adapter.tlora_{name}={value:g}" for name, value in theirs.items())
        raise UserError(
            f"{_SETTING}={path} is a T-LoRA, whose ranks act by noise level, and here they do not act as they did "
            f"there: set {asked}",
            code="conflict",
            setting=_SETTING,
        )
    if own is None or theirs:
        return []
    return [f"{path} is a LoRA all ranks of which act; here the last ones do not on noisy samples (tlora_min_rank)"]


@torch.no_grad()
def take_up(path: Path, found: Mapping[str, Iterable[Addition]], networks: Mapping[str, nn.Module]) -> list[str]:
    """Puts the factors of a file into the additions of the networks, with the strength that they have in the file. An
    addition that the file lacks keeps its start. Returns messages for the user.

    Raises:
        UserError: for a layer of the file that gets no addition here, and for another kind or rank.
    """
    taken = 0
    for component, additions in found.items():
        layers = wrapped(networks[component]) if component in networks else {}
        for each in additions:
            if (layer := layers.get(each.layer)) is None:
                raise UserError(
                    f"{_SETTING}={path}: the file has an addition to {component}.{each.layer}, and this recipe trains "
                    f"none there: set targets and ranks so that it does",
                    code="conflict",
                    setting=_SETTING,
                )
            own = _own(layer)
            _check(path, f"{component}.{each.layer}", each, own)
            for name, value in each.factors.items():
                given = value.float() * (each.scale / layer.scaling[ADAPTER] if name == each.strong else 1.0)
                own[name].copy_(given.reshape(own[name].shape))
            taken += 1
    left = sum(len(wrapped(network)) for network in networks.values()) - taken
    rest = f"; {left} layers that it lacks start without effect" if left else ""
    return [f"{taken} layers start from the LoRA in {path}{rest}"]


def _own(layer: nn.Module) -> dict[str, Tensor]:
    """The trained factors of a layer, by the names that a file has for them."""
    own: dict[str, Tensor] = {}
    for name, p in layer.named_parameters():
        if f".{ADAPTER}" in name:
            plain = name.replace(f".{ADAPTER}", "")
            own[plain.removesuffix(".weight") if "magnitude" in plain else plain] = p
    return own


def _check(path: Path, name: str, addition: Addition, own: Mapping[str, Tensor]) -> None:
    """UserError for an addition of another kind or rank."""
    theirs = {factor: _sizes(value) for factor, value in addition.factors.items()}
    if theirs.keys() != own.keys():
        raise UserError(
            f"{_SETTING}={path}: {name} has {', '.join(sorted(theirs))} in the file, and this recipe trains "
            f"{', '.join(sorted(own))}: set adapter.kind to the file's",
            code="conflict",
            setting=_SETTING,
        )
    if any(theirs[factor] != _sizes(value) for factor, value in own.items()):
        what = f"rank {addition.rank}" if addition.rank else f"factors of {[*theirs.values()]}"
        raise UserError(
            f"{_SETTING}={path}: {name} has {what} in the file, and another one here: set adapter.rank, "
            "ranks or rank_pattern to it, or change the file's with `daguerre convert resize`",
            code="conflict",
            setting=_SETTING,
        )


def _sizes(value: Tensor) -> list[int]:
    """Of a factor, without the sizes of 1 that programs write or leave out: around lengths, and behind two others."""
    if value.numel() == max(value.shape):
        return [value.numel()] if value.dim() != 2 else [*value.shape]
    return [*shapes.plain(value.shape)]
