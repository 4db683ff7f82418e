"""Frozen networks that are left out of memory where their results are cached, and are there when something needs them.

A network that is left out is built on the meta device, from its config alone: what reads its numbers works, and
`present` gives it its weights for a while.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from daguerre.models.weights import file_digests

if TYPE_CHECKING:
    from daguerre.models.family import Family

# A context variable: families load their networks many calls below, and none of them hands a choice through.
_LEFT_OUT: ContextVar[frozenset[str]] = ContextVar("left_out", default=frozenset())
ROLES = {"autoencoder": "images", "image_encoder": "images", "text_encoder": "texts"}
"""Roles of networks whose results may be cached, and the half of a cache that has them."""


@contextmanager
def leaving_out(names: Collection[str]) -> Iterator[None]:
    """Networks of these components that are loaded within the block are left out of memory."""
    token = _LEFT_OUT.set(frozenset(names))
    try:
        yield
    finally:
        _LEFT_OUT.reset(token)


def is_left_out(name: str) -> bool:
    """True within `leaving_out` of this component."""
    return name in _LEFT_OUT.get()


def absent(family: Family) -> dict[str, nn.Module]:
    """The components that are left out of memory at present. {} for a family that is wholly without memory."""
    left_out = {} if family.pretrained is None else family.pretrained.left_out
    return {
        name: network
        for name, network in family.components.items()
        if name in left_out and any(p.is_meta for p in network.parameters())
    }


def moved(network: nn.Module, device: torch.device | str) -> None:
    """Moves a network, in place, but for what is left out of memory."""
    if any(p.is_meta for p in network.parameters()):
        # `to` refuses a network of which some parameters have no memory.
        network._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    else:
        network.to(device)


@contextmanager
def present(family: Family, device: torch.device | None = None, names: Collection[str] | None = None) -> Iterator[None]:
    """Within the block, the networks that were left out (or those of these names) have their weights, on the family's
    device or another one. UserError where they cannot be read."""
    taken, device = [], device or family.device
    try:
        for name, network in absent(family).items():
            if names is None or name in names:
                assert family.pretrained is not None
                # Read again each time: kept on the host they would take the memory that leaving them out saves.
                taken += _filled(network, family.pretrained.left_out[name](), device)
        yield
    finally:
        # Also after an error: what follows must not find a network that is there by chance.
        for table, slot, tensor in taken:
            table[slot] = tensor


def restored(family: Family, names: Collection[str]) -> None:
    """Gives networks that were left out their weights for good."""
    for name in names:
        assert family.pretrained is not None
        _filled(family.components[name], family.pretrained.left_out.pop(name)(), family.device)


def _filled(network: nn.Module, fresh: nn.Module, device: torch.device) -> list[tuple[Any, str, Tensor]]:
    """Gives a network on the meta device the tensors of another; returns what was there before."""
    # With duplicates: tied weights have two names, and both slots must be filled.
    own = dict(fresh.named_parameters(remove_duplicate=False)) | dict(fresh.named_buffers(remove_duplicate=False))
    taken = []
    for prefix, module in network.named_modules():
        tables: tuple[Any, ...] = (module._parameters, module._buffers)
        for table in tables:
            for slot, tensor in [*table.items()]:
                if tensor is None or not tensor.is_meta:
                    continue
                value = own[f"{prefix}.{slot}".lstrip(".")].detach().to(device, tensor.dtype)
                if value.stride() != tensor.stride():  # by which a kernel is chosen that rounds otherwise
                    value = torch.empty_strided(
                        tensor.size(), tensor.stride(), dtype=value.dtype, device=value.device
                    ).copy_(value)
                is_parameter = isinstance(tensor, nn.Parameter)
                table[slot] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
                taken.append((table, slot, tensor))
    return taken


def identity(family: Family, component: str, anew: bool = False) -> str:
    """Stands for the weights and config of a component: for the bytes of its files, or its numbers and seed. `anew`:
    every file is read, whatever its size and time of change say."""
    assert family.pretrained is not None, "families that can leave networks out load them by components"
    told = family.pretrained.origin(component, lambda path: file_digests.xxh3_128(path, anew))
    return sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
