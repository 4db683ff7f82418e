"""Splits a network over a mesh, as distributed/sharding_rules.py has placed its parameters: tensor parallel first,
then FSDP2.

The engine is PyTorch's: DTensor, `parallelize_module`, `fully_shard`. A network knows nothing of it. Gradients are
summed, never averaged: the loss is divided by the global count of samples before it is differentiated. The data axis of
a network that FSDP2 does not hold is distributed/collectives.py's. Names and shapes of parameters stay as they were;
`Split` knows the one thing that changes, the order of elements in layers whose segments are each split.
"""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from daguerre.distributed.mesh import AXES, Mesh
from daguerre.distributed.sharding_rules import ParameterSplit, axes_of
from daguerre.training.precision import quantized
from daguerre.training.sharding import Order

_REMARKS = logging.getLogger("torch.distributed.tensor._redistribute")


@dataclass(frozen=True)
class Split:
    """A network that was split."""

    mesh: DeviceMesh
    orders: Mapping[str, Order]
    """By parameter, of those whose elements were put into another order."""

    def own_order(self, name: str, whole: Tensor) -> Tensor:
        """A gathered parameter (or its average, or its moments) with its elements as the network's library has them."""
        if name not in self.orders:
            return whole
        dim, indices = self.orders[name]
        return torch.empty_like(whole).index_copy_(dim, indices.to(whole.device), whole)


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
    called: Collection[str] = (),
) -> Split:
    """Splits `net` in place. Every rank must hold the same weights.

    Args:
        units: class names of the modules that FSDP2 gathers and frees one at a time.
        heads: attributes by which attention modules count their heads; those of split ones become the device's own.
        called: class names of modules inside of components that are called by themselves.
    """
    where = {each.name: each for each in placed}
    degree = mesh.degree("tensor")
    orders = _put_in_order(net, where, degree)
    if degree > 1:
        _tensor_parallel(net, where, devices["tensor"], degree, heads)
    if mesh.degree("fsdp") > 1:
        over = devices["data", "fsdp"] if mesh.degree("data") > 1 else devices["fsdp"]
        _fully_shard(net, where, over, blocks(net, units), blocks(net, called))
    return Split(devices, orders)


@torch.no_grad()
def _put_in_order(net: nn.Module, where: Mapping[str, ParameterSplit], degree: int) -> dict[str, Order]:
    """Puts elements into the order in which each of `degree` equal parts holds its part of every segment: the engine
    cuts equal parts and knows no segments."""
    found: dict[str, Order] = {}
    for name, parameter in net.named_parameters():
        if order := where[name].order(degree):
            dim, indices = where[name].tensor or 0, torch.tensor(order)
            parameter.copy_(parameter.index_select(dim, indices.to(parameter.device)))
            found[name] = Order(dim, indices)
    return found


def _tensor_parallel(
    net: nn.Module, where: Mapping[str, ParameterSplit], devices: DeviceMesh, degree: int, heads: Collection[str]
) -> None:
    """Splits linear layers by rows (columns of the product) or by columns, as their weights are placed. Of one with a
    LoRA it is the layer inside and one of the two factors; the wrapper adds what these give."""
    for name, module in net.named_modules():
        trained = {key: p.requires_grad for key, p in module.named_parameters(recurse=False)}
        # A parameter that is tied to another module's has the name that it has there.
        own = {key: where[whole] for key in trained if (whole := f"{name}.{key}".lstrip(".")) in where}
        if (style := _style(module, own)) is not None:
            parallelize_module(module, devices, style)
            for key, p in module.named_parameters(recurse=False):
                p.requires_grad_(trained[key])  # the parameters are new ones
    for name, module in net.named_modules():
        for attribute in heads:
            if isinstance(count := vars(module).get(attribute), int) and _heads_are_split(name, module, where):
                setattr(module, attribute, count // degree)  # diffusers' attention asks for it


def _style(module: nn.Module, own: Mapping[str, ParameterSplit]) -> ParallelStyle | None:
    """The style by which a module with these parameters is split; None where each device has it whole."""
    if any(placed.partial for placed in own.values()):
        # A norm of heads treats every row alike, so that along any dim but the last what a device has is a part of the
        # input. The engine then knows that gradients are partial.
        return SequenceParallel(sequence_dim=0, use_local_output=True)
    if not isinstance(module, nn.Linear | nn.Embedding) or "weight" not in own or own["weight"].tensor is None:
        return None
    # The columns of an embedding are features, as the rows of a linear layer are.
    features = 0 if isinstance(module, nn.Linear) else 1
    return ColwiseParallel() if own["weight"].tensor == features else RowwiseParallel()


def _heads_are_split(name: str, module: nn.Module, where: Mapping[str, ParameterSplit]) -> bool:
    placed = [where[f"{name}.{parameter}"] for parameter, _ in module.named_parameters()]
    return any(each.tensor is not None and "heads" in axes_of(each.dims[each.tensor]) for each in placed)


def blocks(net: nn.Module, units: Collection[str]) -> list[nn.Module]:
    """The modules of `net` whose class has one of these names."""
    return [module for module in net.modules() if _is_one(module, units)]


def _is_one(module: nn.Module, names: Collection[str]) -> bool:
    """True if its class has one of these names, or is made of one that has: kernels stand in for a network's own."""
    return any(kind.__name__ in names for kind in type(module).__mro__)


def _fully_shard(
    net: nn.Module,
    where: Mapping[str, ParameterSplit],
    devices: DeviceMesh,
    units: Sequence[nn.Module],
    inside: Sequence[nn.Module],
) -> None:
    """FSDP2 around each unit and around the rest; over two axes it is HSDP: sharded along the last, copied along the
    first."""
    dims = {id(parameter): where[name].fsdp for name, parameter in net.named_parameters()}
    quantized.as_parameters(net)

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(dims.get(id(parameter)) or 0)  # codes of few bits have no place of their own: along the first dim

    with torch.no_grad():
        for parameter in net.parameters():
            parameter.data = parameter.data.contiguous()  # FSDP2 cuts no other
    # The components, too, as they are called by themselves as well: a text encoder that is trained reads prompts.
    # Not the lists of blocks that a UNet alone, which is frozen, has for children: they are never called.
    called = [m for m in net.children() if not isinstance(m, nn.ModuleList) and m not in units]
    # Nor what shares a parameter with another one, such as T5's embedding: each would get a copy of its own.
    owners = Counter(id(p) for m in net.children() for p in m.parameters())
    components = [m for m in called if {owners[id(p)] for p in m.parameters()} == {1}]
    deep = [module for module in inside if module not in (*components, net)]
    for module in [*units, *deep, *components, net]:
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
    of tensors that are split the same way and otherwise can be handled in one call. `hand_over` gives them their
    gradients.
    """
    return [nn.Parameter(local(p.detach()), p.requires_grad) if isinstance(p, DTensor) else p for p in parameters]


def hand_over(parameters: Sequence[nn.Parameter], parts: Sequence[nn.Parameter]) -> None:
    """The gradients of parameters, as those of their own parts."""
    for p, part in zip(parameters, parts, strict=True):
        if part is not p:
            part.grad = None if p.grad is None else local(summed(p.grad, p))
            p.grad = None


def summed(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient, split as its parameter is: what devices have of it in part is summed, by all of them."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient


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
