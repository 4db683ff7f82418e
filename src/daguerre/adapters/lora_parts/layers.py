"""The layers of a network that get an addition of the adapter `lora`: by name and by pattern, each with its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from daguerre.errors import UserError

if TYPE_CHECKING:
    from daguerre.adapters.lora import Settings
    from daguerre.models.network import Network

PRESETS = ("attention", "ff", "conv", "all")
"""Attention's four products; feed-forward layers, and what leads into a transformer and out of it; layers of residual
blocks; every linear layer and convolution. Which layers these are, the facts of a network say (models/network.py)."""
IN_PEFT_LORA = ("lora", "rslora", "dora")
"""Kinds that are peft's LoraConfig, and that diffusers has. Of these alone peft drops inputs and has inits."""
OF_MATRICES = ("pissa", "pissa_niter_16", "olora", "orthogonal")
"""Inits that peft has for linear layers alone."""
FROM_BASE = OF_MATRICES[:-1]
"""Inits that take a part of the weight itself as the addition."""


class Numbers(NamedTuple):
    """Of the addition to one layer."""

    rank: int
    alpha: float
    dropout: float


def wrapped(network: nn.Module) -> dict[str, Any]:
    """The layers of a network that have an addition, by name."""
    return {name: module for name, module in network.named_modules() if isinstance(module, BaseTunerLayer)}


def chosen(component: str, network: Network, settings: Settings, rank: int, used: set[str]) -> dict[str, Numbers]:
    """The layers that get an addition, without those that no output depends on.

    Args:
        rank: of layers that no pattern means.
        used: gets the patterns that mean a layer.

    Raises:
        UserError: for a layer of a shape that this kind or this init cannot have.
    """
    found: dict[str, Numbers] = {}
    unread = {id(parameter) for parameter in network.unread}
    patterns = targeted(settings, network)
    for name, module in network.module.named_modules():
        if not isinstance(module, nn.Linear | nn.Conv2d) or id(module.weight) in unread:
            continue
        whole = f"{component}.{name}"
        meant = [pattern for pattern in patterns if _means(pattern, whole)]
        if not meant:
            continue
        own: dict[str, Any] = {"rank": rank, "alpha": settings.alpha, "dropout": settings.dropout}
        used |= {*meant}
        for key in own:
            by_pattern: Mapping[str, Any] = getattr(settings, f"{key}_pattern")
            if (pattern := next((each for each in by_pattern if _means(each, whole)), None)) is not None:
                used.add(pattern)
                own[key] = by_pattern[pattern]
        if own["rank"] is not None:
            found[name] = numbers(settings, **own)
            _check_shape(settings, whole, module, own["rank"])
    return found


def targeted(settings: Settings, network: Network) -> tuple[str, ...]:
    """Patterns of the names of the layers of a network that get an addition."""
    if not isinstance(settings.targets, str):
        return tuple(settings.targets)
    known = {**network.facts.layers, "all": ("*",)}
    return tuple(pattern for preset in settings.targets.split("+") for pattern in known.get(preset, ()))


def numbers(settings: Settings, rank: int, alpha: float | None, dropout: float) -> Numbers:
    """Those of a layer; the alpha that multiplies by 1, where none is given."""
    if alpha is None:
        alpha = math.sqrt(rank) if settings.kind == "rslora" else rank
    return Numbers(rank, alpha, dropout)


def _means(pattern: str, name: str) -> bool:
    """Compares: a pattern means a name, or its end after a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(f".{name}", f"*.{pattern}")


def _check_shape(settings: Settings, name: str, layer: nn.Linear | nn.Conv2d, rank: int) -> None:
    """UserError for a layer to which this kind cannot be added, or which this init cannot start."""
    way = "leave it out of targets, or set rank_pattern"
    of_lora = settings.kind in IN_PEFT_LORA
    if settings.kind == "boft":
        inputs = layer.weight[0].numel()
        if inputs % rank:
            raise UserError(f"{name} has {inputs} inputs, which blocks of rank={rank} do not divide: {way}")
    elif isinstance(layer, nn.Conv2d) and layer.groups > 1 and of_lora and rank % layer.groups:
        raise UserError(
            f"{name} is a convolution of {layer.groups} groups, which must divide the rank of a LoRA ({rank}): {way}, "
            "or use kind=loha or lokr"
        )
    if settings.init not in OF_MATRICES:
        return
    if isinstance(layer, nn.Conv2d):
        raise UserError(
            f"{name} is a convolution, and init={settings.init} is defined for matrices alone (peft refuses it, too): "
            "leave it out of targets, set rank_pattern to null for it, or use init=default"
        )
    if settings.init == "orthogonal" and rank % 2:
        raise UserError(f"{name}: init=orthogonal needs an even rank, not {rank}: set rank or rank_pattern")
    if settings.init in FROM_BASE and rank > min(layer.weight.shape):
        raise UserError(
            f"{name} is a matrix of {list(layer.weight.shape)}, of which init={settings.init} cannot take a part of "
            f"rank {rank}: set rank_pattern"
        )
