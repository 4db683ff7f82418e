"""Frozen networks that are not in a device's memory all the time.

Those whose results are cached are left out of memory: built on the meta device, from their configs alone, so that what
reads their numbers works; `present` gives them their weights for a while. Text encoders may wait in the host's memory
(training.text_encoders=offload): `at_work` takes one to its device while it computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from daguerre import deferred
from daguerre.models.weights import file_digests
from daguerre.types import waits

if TYPE_CHECKING:
    from daguerre.models.family import Family

# A context variable: families load their networks many calls below, and none of them hands a choice through.
_LEFT_OUT: ContextVar[frozenset[str]] = ContextVar("left_out", default=frozenset())
_HOMES = ("cpu", "meta")
"""Types of devices whose memory is the host's, or none."""
_WAITING, _ASIDE = "waiting", "aside"
"""Attributes of networks that are elsewhere, no parts of their state."""
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


class Waiting(NamedTuple):
    """The state of a network that is in the host's memory until it computes."""

    device: torch.device
    """Where it computes."""
    makes_room: tuple[nn.Module, ...] = ()
    """Networks whose frozen weights are in the host's memory meanwhile."""
    files: nn.Module | None = None
    """The same network with weights that are read of their files each time, where it takes no memory of the host."""


def waiting(network: nn.Module) -> Waiting | None:
    """The state of a network that waits; None for one that does not."""
    found: Waiting | None = vars(network).get(_WAITING)
    return found


def wait(network: nn.Module, device: torch.device) -> None:
    """Puts a frozen network into the host's memory until it computes on a device. Of a GPU the memory is pinned, from
    which it reads without the host's help."""
    home = torch.device("cpu")
    pins = device.type == "cuda"
    deferred.read(network)
    network._apply(lambda t: t if t.is_meta else t.to(home).pin_memory() if pins else t.to(home))
    vars(network)[_WAITING] = Waiting(device)


def device_of(network: nn.Module) -> torch.device:
    """The device on which a network computes."""
    found = waiting(network)
    return next(network.parameters()).device if found is None else found.device


@contextmanager
def at_work(network: nn.Module) -> Iterator[None]:
    """Within the block, a network that waits is on the device where it computes. Nothing is copied back, as it is
    frozen, and nothing twice, by a block inside."""
    if (own := waiting(network)) is None:
        yield
        return
    with aside(own.makes_room), _there(network, own):
        del vars(network)[_WAITING]
        try:
            yield
        finally:
            vars(network)[_WAITING] = own


@contextmanager
def aside(networks: Iterable[nn.Module]) -> Iterator[None]:
    """Within the block, the frozen weights of these networks are in the host's memory, which makes room. What is
    trained, and what several devices share, stays."""
    networks, changed = [*networks], list[tuple[Tensor, torch.device]]()
    try:
        for network in networks:
            vars(network)[_ASIDE] = True
            for _, _, tensor in _slots(network):
                if not (tensor.requires_grad or isinstance(tensor, DTensor) or tensor.device.type in _HOMES):
                    changed.append((tensor, tensor.device))
                    # In place: whoever refers to a weight still does.
                    tensor.data = _copied(tensor, torch.device("cpu")).data
        yield
    finally:
        for tensor, device in changed:
            tensor.data = _copied(tensor, device).data
        for network in networks:
            vars(network).pop(_ASIDE, None)


def denoisers(family: Family) -> tuple[nn.Module, ...]:
    """The networks that make room for encoders."""
    return tuple(network.module for network in family.networks.values() if network.denoises)


def held_bytes(network: nn.Module) -> int:
    """Bytes of the weights and buffers of a network."""
    return sum(tensor.nbytes for tensor in {id(t): t for _, _, t in _slots(network)}.values())


def is_elsewhere(network: nn.Module) -> bool:
    """True for a network whose weights are not where it computes."""
    return _WAITING in vars(network) or _ASIDE in vars(network)


def _slots(network: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Every place of a parameter or buffer, with what is there; tied weights have several."""
    for module in network.modules():
        tables: tuple[Any, ...] = (module._parameters, module._buffers)
        for table in tables:
            yield from ((table, slot, tensor) for slot, tensor in [*table.items()] if tensor is not None)


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """The same numbers in the same layout, in memory of their own on a device."""
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    made.copy_(tensor.detach(), non_blocking=tensor.is_pinned() if tensor.device.type == "cpu" else False)
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


@contextmanager
def _there(network: nn.Module, own: Waiting) -> Iterator[None]:
    """Within the block, a network that waits has its weights on the device where it computes."""
    if own.files is None:
        with _exchanged(network, lambda tensor: _copied(tensor, own.device)):
            yield
        return
    taken = _filled(network, own.files, own.device)
    try:
        yield
    finally:
        _put_back(taken)


def _put_back(taken: Iterable[tuple[Any, str, Tensor]]) -> None:
    for table, slot, tensor in taken:
        table[slot] = tensor


@contextmanager
def _exchanged(network: nn.Module, other: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the block, other tensors stand in the places of a network's."""
    made: dict[int, Tensor] = {}
    before = [*_slots(network)]
    try:
        for table, slot, tensor in before:
            if id(tensor) not in made:
                made[id(tensor)] = other(tensor)
            table[slot] = made[id(tensor)]
        yield
    finally:
        # Also after an error: what follows must not find a network that is there by chance.
        _put_back(before)


def moved(network: nn.Module, device: torch.device | str) -> None:
    """Moves a network, in place, but for what is left out of memory, one that waits, and blocks that do."""
    if waiting(network) is not None:
        return
    deferred.read(network, device)
    if any(p.is_meta or waits(p) for p in network.parameters()):
        # `to` refuses a network of which some parameters have no memory.
        network._apply(lambda tensor: tensor if tensor.is_meta or waits(tensor) else tensor.to(device))
    else:
        network.to(device)


@contextmanager
def present(
    family: Family,
    device: torch.device | None = None,
    names: Collection[str] | None = None,
    stays: bool = False,
    exports: bool = False,
) -> Iterator[None]:
    """Within the block, the networks that were left out (or those of these names) have their weights, on the family's
    device or another one. Text encoders have them while they compute alone, and the denoiser makes room meanwhile,
    unless they `stay` on the device; where the block `exports` them, too, they wait in the host's memory. UserError
    where they cannot be read."""
    taken, device = [], device or family.device
    wanted = {name: network for name, network in absent(family).items() if names is None or name in names}
    own_memory = not stays and device.type not in _HOMES
    hold = {name for name in wanted if own_memory and family.networks[name].role == "text_encoder"}
    try:
        for name, network in wanted.items():
            assert family.pretrained is not None
            # Read again each time: kept on the host they would take the memory that leaving them out saves, and that
            # of the denoiser, which is there while they compute.
            fresh = read_again(family, name)
            files = fresh if name in hold and not exports else None
            if files is None:
                taken += _filled(network, fresh, torch.device("cpu") if name in hold else device)
            if name in hold:
                vars(network)[_WAITING] = Waiting(device, denoisers(family), files)
        yield
    finally:
        for name in hold:
            vars(wanted[name]).pop(_WAITING, None)
        # Also after an error: what follows must not find a network that is there by chance.
        _put_back(taken)


def restored(family: Family, names: Collection[str]) -> None:
    """Gives networks that were left out their weights for good."""
    for name in names:
        assert family.pretrained is not None
        _filled(family.components[name], read_again(family, name), family.device)
        del family.pretrained.left_out[name]


def read_again(family: Family, name: str) -> nn.Module:
    """A network that was left out, loaded again; its weights are read when they are asked for (deferred/)."""
    assert family.pretrained is not None
    with deferred.deferring():
        found: nn.Module = family.pretrained.left_out[name]()
    return found


def _filled(network: nn.Module, fresh: nn.Module, device: torch.device) -> list[tuple[Any, str, Tensor]]:
    """Gives a network on the meta device the tensors of another; returns what was there before."""
    # With duplicates: tied weights have two names, and both slots must be filled.
    own = dict(fresh.named_parameters(remove_duplicate=False)) | dict(fresh.named_buffers(remove_duplicate=False))
    taken, made = [], dict[int, Tensor]()
    for prefix, module in network.named_modules():
        tables: tuple[Any, ...] = (module._parameters, module._buffers)
        for table in tables:
            for slot, tensor in [*table.items()]:
                if tensor is None or not tensor.is_meta:
                    continue
                found = own[f"{prefix}.{slot}".lstrip(".")]
                if id(found) not in made:  # weights that are tied are one
                    made[id(found)] = deferred.stored(found, tensor.dtype).to(device)
                value = made[id(found)]
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
