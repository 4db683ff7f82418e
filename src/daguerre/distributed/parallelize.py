"""Splits a network over a mesh, as distributed/sharding_rules.py has placed its parameters: tensor parallel first,
then FSDP2.

The engine is PyTorch's: DTensor, `parallelize_module`, `fully_shard`. A network knows nothing of it. Gradients are
summed, never averaged: the loss is divided by the global count of samples before it is differentiated. The data axis of
a network that FSDP2 does not hold is distributed/collectives.py's. Names and shapes of parameters stay as they were;
`Split` knows the one thing that changes, the order of rows in layers whose segments are each split.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from daguerre.distributed.mesh import AXES, Mesh
from daguerre.distributed.sharding_rules import ParameterSplit, axes_of

_REMARKS = logging.getLogger("torch.distributed.tensor._redistribute")


@dataclass(frozen=True)
class Split:
    """A network that was split."""

    mesh: DeviceMesh
    rows: Mapping[str, Tensor]
    """By parameter: which of its own rows stands where, for parameters whose rows were put into another order."""

    def own_order(self, name: str, whole: Tensor) -> Tensor:
        """A gathered parameter (or its average, or its moments) with its rows as the network's library has them."""
        if name not in self.rows:
            return whole
        restored = torch.empty_like(whole)
        restored[self.rows[name].to(whole.device)] = whole
        return restored


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """The mesh as torch.distributed knows it, whose process group must have been made."""
    return DeviceMesh(device_type, mesh.ranks(), mesh_dim_names=AXES)


def apply(
    net: nn.Module,
    mesh: Mesh,
    placed: Sequence[ParameterSplit],
    devices: DeviceMesh,
    units: Collection[str],
    heads: Collection[str],
) -> Split:
    """Splits `net` in place. Every rank must hold the same weights.

    Args:
        units: class names of the modules that FSDP2 gathers and frees one at a time.
        heads: attributes by which attention modules count their heads; those of split ones become the device's own.
    """
    where = {each.name: each for each in placed}
    degree = mesh.degree("tensor")
    rows = _tensor_parallel(net, where, devices["tensor"], degree, heads) if degree > 1 else {}
    if mesh.degree("fsdp") > 1:
        over = devices["data", "fsdp"] if mesh.degree("data") > 1 else devices["fsdp"]
        _fully_shard(net, where, over, blocks(net, units))
    return Split(devices, rows)


def _tensor_parallel(
    net: nn.Module, where: Mapping[str, ParameterSplit], devices: DeviceMesh, degree: int, heads: Collection[str]
) -> dict[str, Tensor]:
    """Splits linear layers by rows (columns of the product) or by columns, as their weights are placed. Of one with a
    LoRA it is the layer inside and one of the two factors; the wrapper adds what these give."""
    rows: dict[str, Tensor] = {}
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear):
            placed = where[f"{name}.weight"]
            dim = placed.tensor
            if dim == 0 and isinstance(segments := placed.dims[0], tuple):
                rows |= _interleave(name, module, len(segments), degree)
            if dim is not None:
                parallelize_module(module, devices, ColwiseParallel() if dim == 0 else RowwiseParallel())
    for name, module in net.named_modules():
        for attribute in heads:
            if isinstance(count := getattr(module, attribute, None), int) and _heads_are_split(name, module, where):
                setattr(module, attribute, count // degree)  # diffusers' attention asks for it
    return rows


def _heads_are_split(name: str, module: nn.Module, where: Mapping[str, ParameterSplit]) -> bool:
    placed = [where[f"{name}.{parameter}"] for parameter, _ in module.named_parameters()]
    return any(each.tensor is not None and "heads" in axes_of(each.dims[each.tensor]) for each in placed)


def blocks(net: nn.Module, units: Collection[str]) -> list[nn.Module]:
    """The modules of `net` whose class has one of these names."""
    return [module for module in net.modules() if _is_one(module, units)]


def _is_one(module: nn.Module, names: Collection[str]) -> bool:
    """True if its class has one of these names, or is made of one that has: kernels stand in for a network's own."""
    return any(kind.__name__ in names for kind in type(module).__mro__)


@torch.no_grad()
def _interleave(name: str, layer: nn.Linear, segments: int, degree: int) -> dict[str, Tensor]:
    """Puts rows in an order in which each of `degree` equal parts holds its part of every segment."""
    order = torch.arange(layer.out_features).reshape(segments, degree, -1).transpose(0, 1).reshape(-1)
    found = {}
    for key, parameter in layer.named_parameters():
        parameter.copy_(parameter[order.to(parameter.device)])
        found[f"{name}.{key}"] = order
    return found


def _fully_shard(
    net: nn.Module, where: Mapping[str, ParameterSplit], devices: DeviceMesh, units: Sequence[nn.Module]
) -> None:
    """FSDP2 around each unit and around the rest; over two axes it is HSDP: sharded along the last, copied along the
    first."""
    dims = {id(parameter): where[name].fsdp for name, parameter in net.named_parameters()}

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(dims[id(parameter)] or 0)

    with torch.no_grad():
        for parameter in net.parameters():
            parameter.data = parameter.data.contiguous()  # FSDP2 cuts no other
    # The components, too, as they are called by themselves as well: a text encoder that is trained reads prompts.
    # Not the lists of blocks that a UNet alone, which is frozen, has for children: they are never called.
    called = [m for m in net.children() if not isinstance(m, nn.ModuleList)]
    components = [m for m in called if m not in units and any(True for _ in m.parameters())]
    for module in [*units, *components, net]:
        before = type(module)
        fully_shard(module, mesh=devices, shard_placement_fn=placement)
        # It is a class of FSDP2's own now, and transformers asks by the class's text which layers it may hand out.
        type(module).__module__, type(module).__qualname__ = before.__module__, before.__qualname__
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sums, not means
            module.set_force_sum_reduction_for_comms(True)  # by plain sums: gloo has no other


def sync_gradients(net: nn.Module, now: bool) -> None:
    """Lets the next backward pass share gradients, or not: off for all micro-batches of an update but the last."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(now, recurse=False)


def drop_gathered(net: nn.Module) -> None:
    """Drops what FSDP2 has gathered for a pass without gradients: after the parts were written to, it is stale."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def own_parts(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Of each parameter the part that this rank holds, as a parameter of its own in the same memory; one that is no
    DTensor is its own part.

    Optimizers and averages work on these: their arithmetic goes element by element and needs no other rank, and lists
    of tensors that are split alike and otherwise can be handled in one call. `hand_over` gives them their gradients.
    """
    return [nn.Parameter(local(p.detach()), p.requires_grad) if isinstance(p, DTensor) else p for p in parameters]


def hand_over(parameters: Sequence[nn.Parameter], parts: Sequence[nn.Parameter]) -> None:
    """The gradients of parameters, as those of their own parts."""
    for p, part in zip(parameters, parts, strict=True):
        if part is not p:
            part.grad = None if p.grad is None else local(p.grad)
            p.grad = None


def local(tensor: Tensor) -> Tensor:
    """The part of a parameter or gradient that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a parameter or gradient, on every rank; a collective call."""
    if not isinstance(tensor, DTensor):
        return tensor
    level = _REMARKS.level
    _REMARKS.setLevel(logging.ERROR)  # that two axes are gathered one after the other is no news
    try:
        return tensor.full_tensor()
    finally:
        _REMARKS.setLevel(level)
