"""Weights that are read from their file when their type and place are known, one after the other.

Networks are wrapped, and their types decided, before a weight of theirs has memory, so that the host never holds a
wider copy of a network, or a second one. Until it is read a parameter has its shape and its type. All of its numbers
are one, NaN: whatever computes with it too early shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from daguerre.types import waits

# A context variable: families load their networks many calls below, and none of them hands a choice through.
_DEFERS: ContextVar[bool] = ContextVar("defers", default=False)
_WEIGHT = "deferred"
"""Attribute of a parameter that is not read yet: its `Weight`."""
_CPU = torch.device("cpu")


class Weight:
    """A weight in a file."""

    def __init__(self, read: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> None:
        """`read` gives the weight in a type, in memory of its own; `dtype` is the type that the file has."""
        self._read, self.dtype = read, dtype
        self._changes: list[Callable[[Tensor], Tensor]] = []
        self._seen: list[Callable[[Tensor], None]] = []
        self._otherwise: Callable[[], None] | None = None

    def narrow_if(self, otherwise: Callable[[], None]) -> None:
        """Has the weight read in the type of its parameter only if that has all of its numbers; where it has not,
        calls `otherwise`, which gives the parameter another type."""
        self._otherwise = otherwise

    def change(self, by: Callable[[Tensor], Tensor]) -> None:
        """Has the weight changed by a function, float32 to float32, whenever it is read."""
        self._changes.append(by)

    def watch(self, seen: Callable[[Tensor], None]) -> None:
        """Calls `seen` with the weight in float32, the next time that it is read."""
        self._seen.append(seen)

    def value(self) -> Tensor:
        """The weight in float32, read now."""
        value = self._read(torch.float32)
        for by in self._changes:
            value = by(value)
        watching, self._seen = self._seen, []
        for seen in watching:
            seen(value)
        return value

    def stored(self, dtype: torch.dtype) -> Tensor:
        """The weight in a type, rounded once."""
        as_it_is = self.holds(dtype) and not self._seen
        return self._read(dtype) if as_it_is else self.value().to(dtype)

    def read(self, p: nn.Parameter) -> Tensor:
        """The weight in the type of its parameter."""
        if self._otherwise is None or self.holds(p.dtype):
            return self.stored(p.dtype)
        value = self.value()
        narrow = value.to(p.dtype)
        if not torch.equal(narrow.float(), value):
            self._otherwise()
        return value.to(p.dtype)

    def holds(self, dtype: torch.dtype) -> bool:
        """True where all of its numbers are numbers of this type, as its file has them in it."""
        return self.dtype == dtype and not self._changes


@contextmanager
def deferring(defers: bool = True) -> Iterator[None]:
    """Networks that are loaded within the block are read later, or (False) at once."""
    token = _DEFERS.set(defers)
    try:
        yield
    finally:
        _DEFERS.reset(token)


def is_on() -> bool:
    """True within `deferring`."""
    return _DEFERS.get()


def parameter(weight: Weight, shape: Sequence[int], requires_grad: bool) -> nn.Parameter:
    """A parameter for a weight that is read later."""
    p = nn.Parameter(torch.empty((), device=_CPU).expand(*shape), requires_grad)
    defer(p, weight)
    return p


def defer(p: nn.Parameter, weight: Weight, dtype: torch.dtype = torch.float32) -> None:
    """Leaves a parameter without memory, as one of a type on the CPU, until it is read."""
    p.data = torch.full((), torch.nan, dtype=dtype, device=_CPU).expand(p.shape)
    setattr(p, _WEIGHT, weight)


def of(tensor: object) -> Weight | None:
    """The weight that a parameter stands for; None for one that is read."""
    found: Weight | None = getattr(tensor, _WEIGHT, None)
    return found


def value(tensor: Tensor) -> Tensor:
    """The numbers of a parameter: in float32, read now, of one that is deferred; else as it is."""
    return tensor.detach() if (weight := of(tensor)) is None else weight.value()


def stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a parameter or a buffer in a type, of a deferred one read now."""
    return tensor.detach().to(dtype) if (weight := of(tensor)) is None else weight.stored(dtype)


def store(p: nn.Parameter, dtype: torch.dtype) -> None:
    """Gives a parameter a type, in place."""
    if (weight := of(p)) is None:
        p.data = p.data.to(dtype)  # `.data`: adapters and tied layers refer to this parameter
    else:
        defer(p, weight, dtype)


def forget(p: nn.Parameter) -> None:
    """Gives a deferred parameter memory for other numbers than those of its file."""
    if of(p) is not None:
        delattr(p, _WEIGHT)
        p.data = torch.empty(p.shape, dtype=p.dtype, device=_CPU)


def read(network: nn.Module, device: torch.device | str = _CPU) -> None:
    """Reads all weights of a network, in place, each in its type and onto a device. Those that wait in the host's
    memory stay there."""
    for p in network.parameters():
        if (weight := of(p)) is not None:
            made = weight.read(p).to(_CPU if waits(p) else device)
            delattr(p, _WEIGHT)
            p.data = made
