"""The interface of training to the other devices that train the same model, and its form for one device.

The loop, the update, the averages and the optimizer see this and no process group. Optimizer and averages work on this
device's part of each parameter, as plain tensors: their arithmetic goes element by element.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Order(NamedTuple):
    """Another order of a parameter's elements along a dim, in which each device's part is contiguous."""

    dim: int
    indices: Tensor
    """Which of the parameter's own elements stands where."""


@dataclass(frozen=True)
class ShardRegion:
    """This device's part of a parameter that is split: a rectangle of it."""

    offsets: tuple[int, ...]
    """Index of its first element along each dim."""
    whole: tuple[int, ...]
    """Shape of all of the parameter."""
    order: Order | None = None
    """Order of the elements in which the rectangle is cut; None: the parameter's own."""


class Sharding:
    """A model and its batches on one device, which holds everything; `distributed/sharding.py` has several devices.

    All devices call every method, in the same order.
    """

    rank: int = 0
    """Number of the part of each global batch that this device computes, from 0."""
    ranks: int = 1
    """Into how many parts a global batch is cut."""

    @property
    def splits(self) -> bool:
        """True if a device holds only a part of some parameters."""
        return False

    def held(self, net: nn.Module) -> dict[str, nn.Parameter]:
        """This device's part of each parameter, in the order of the net: in the same memory."""
        return dict(net.named_parameters())

    def weights(self, net: nn.Module) -> dict[str, Tensor]:
        """This device's part of everything in the net's state dict, buffers included."""
        return dict(net.state_dict())

    def part(self, name: str) -> ShardRegion | None:
        """The part of a parameter that is held; None for all of it."""
        return None

    def rewritten(self, net: nn.Module) -> None:
        """Drops gathered copies; to be called after held parts were written to."""

    def total(self, count: int) -> int:
        """Sum over the parts of the batch of a count that the host knows."""
        return count

    def sum(self, value: Tensor) -> Tensor:
        return value

    def before_backward(self, net: nn.Module, last: bool) -> None:
        """Before each backward pass of an update; gradients are shared in the `last` one."""

    def after_backward(self) -> None:
        """After the last one: gradients of the held parts are the sums over the whole batch."""

    def norm(self, held: Sequence[nn.Parameter]) -> Tensor:
        """The norm of all gradients of the model, 0-dim, at least float32, equal on all devices; 0 without any."""
        gradients = [p.grad for p in held if p.grad is not None]
        return torch.linalg.vector_norm(norms(gradients)) if gradients else torch.zeros((), device=held[0].device)

    @contextmanager
    def swapped(self, net: nn.Module, held: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the context the held parts of these parameters are `values`; then they are restored to the bit."""
        exchange(held, values)
        try:
            yield
        finally:
            exchange(held, values)

    def gather(self, document: Any) -> list[Any]:
        """A small JSON document of each device, in the order of devices."""
        return [document]


UNSHARDED = Sharding()


def norms(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of each gradient, at least in float32."""
    # Squares of float16 overflow, sums of bfloat16 lose digits.
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(list(gradients), 2, dtype=wide))


def exchange(held: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Swaps the memory of parameters with that of values."""
    for name, value in values.items():
        # `.data`: the parameter stays the object that the optimizer, adapters and tied layers refer to.
        held[name].data, value.data = value.data, held[name].data


def cut(whole: Tensor, part: ShardRegion | None, shape: Sequence[int]) -> Tensor:
    """The part, of this shape, of a whole tensor."""
    if part is None:
        return whole
    ordered = whole if part.order is None else whole.index_select(*part.order)
    return ordered[tuple(slice(start, start + length) for start, length in zip(part.offsets, shape, strict=True))]
