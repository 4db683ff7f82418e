"""What training needs of the other devices that train the same model, and the one device that needs nothing.

The loop, the update, the averages and the optimizer see this and no process group. Optimizer and averages work on what
this device holds of each parameter, as plain tensors: their arithmetic goes element by element.
`distributed/sharding.py` has the devices of a mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """What this device holds of a parameter that is split: a rectangle of it."""

    offsets: tuple[int, ...]
    """Where it begins, a dim each."""
    whole: tuple[int, ...]
    """Shape of all of the parameter."""
    order: Tensor | None = None
    """Which of the parameter's own rows stands at which place, where its rows were put into another order."""


class Sharding(Protocol):
    """How a model and its batches are spread over devices. All devices call every method, in the same order."""

    rank: int
    """Which part of each global batch this device computes, from 0."""
    ranks: int
    """Into how many parts a global batch is cut."""

    @property
    def splits(self) -> bool:
        """Whether a device holds only a part of some parameters."""
        ...

    def held(self, net: nn.Module) -> dict[str, nn.Parameter]:
        """What this device holds of each parameter, in the order of the net: in the same memory."""
        ...

    def weights(self, net: nn.Module) -> dict[str, Tensor]:
        """The same of everything in the net's state dict, buffers included."""
        ...

    def part(self, name: str) -> Part | None:
        """Which part of a parameter is held; None for all of it."""
        ...

    def rewritten(self, net: nn.Module) -> None:
        """To be called after what is held was written to: gathered copies are dropped."""
        ...

    def total(self, count: int) -> int:
        """Sum over the parts of the batch of a count that the host knows."""
        ...

    def sum(self, value: Tensor) -> Tensor:
        """Sum over the parts of the batch."""
        ...

    def before_backward(self, net: nn.Module, last: bool) -> None:
        """Before each backward pass of an update; gradients are shared in the `last` one."""
        ...

    def after_backward(self) -> None:
        """After the last one: gradients of the held parts are the sums over the whole batch."""
        ...

    def norm(self, held: Sequence[nn.Parameter]) -> Tensor:
        """The norm of all gradients of the model, 0-dim, at least float32, alike on all devices."""
        ...

    def swapped(
        self, net: nn.Module, held: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]
    ) -> AbstractContextManager[None]:
        """Within the context what is held of these parameters is `values`; afterwards what it was, to the bit."""
        ...

    def gather(self, document: Any) -> list[Any]:
        """A small JSON document of each device, in the order of devices."""
        ...


class Unsharded:
    """One device, which holds everything."""

    rank, ranks, splits = 0, 1, False

    def held(self, net: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters themselves."""
        return dict(net.named_parameters())

    def weights(self, net: nn.Module) -> dict[str, Tensor]:
        """The state dict."""
        return dict(net.state_dict())

    def part(self, name: str) -> Part | None:
        """All of it."""
        return None

    def rewritten(self, net: nn.Module) -> None:
        """There are no other copies."""

    def total(self, count: int) -> int:
        """The count."""
        return count

    def sum(self, value: Tensor) -> Tensor:
        """The value."""
        return value

    def before_backward(self, net: nn.Module, last: bool) -> None:
        """Gradients are not shared."""

    def after_backward(self) -> None:
        """They are complete."""

    def norm(self, held: Sequence[nn.Parameter]) -> Tensor:
        """Of the gradients as they are."""
        gradients = [p.grad for p in held if p.grad is not None]
        return torch.linalg.vector_norm(norms(gradients))

    @contextmanager
    def swapped(self, net: nn.Module, held: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
        """Nothing is copied."""
        exchange(held, values)
        try:
            yield
        finally:
            exchange(held, values)

    def gather(self, document: Any) -> list[Any]:
        """Its own."""
        return [document]


UNSHARDED = Unsharded()


def norms(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of each gradient, at least in float32."""
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(list(gradients), 2, dtype=wide))


def exchange(held: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Parameters and values change their memory."""
    for name, value in values.items():
        held[name].data, value.data = value.data, held[name].data


def cut(whole: Tensor, part: Part | None, shape: Sequence[int]) -> Tensor:
    """The part, of this shape, of a whole tensor."""
    if part is None:
        return whole
    ordered = whole if part.order is None else whole[part.order]
    return ordered[tuple(slice(start, start + length) for start, length in zip(part.offsets, shape, strict=True))]
