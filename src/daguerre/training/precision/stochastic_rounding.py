"""Weights of 16 bits: widened to float32 for an update, rounded back after it. No optimizer here.

bfloat16 has 8 bits of precision: an update of less than 1/512 of a weight is lost if it is rounded to the nearest, and
most updates are. Rounded up or down by chance, with the odds by how near each is, the weight is right on average.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from daguerre import keys

PIECE_NUMBERS = 2**25
"""Numbers that are widened at once, or one tensor: 128 MB of float32 weights, as much of gradients."""
_ALIGNED = 4
"""Tensors begin at multiples of so many numbers in a flat buffer, as fused kernels want it."""
_SMALLEST_NORMAL = {torch.float16: 2.0**-14}


def narrow(tensor: Tensor) -> bool:
    """True for numbers of 16 bits."""
    return tensor.element_size() < 4


def pieces(tensors: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """All at once, or, where they have 16 bits, parts of at most `PIECE_NUMBERS` (but of one tensor at least)."""
    piece: list[nn.Parameter] = []
    numbers = 0
    for tensor in tensors:
        if piece and narrow(tensor) and numbers + tensor.numel() > PIECE_NUMBERS:
            yield piece
            piece, numbers = [], 0
        piece.append(tensor)
        numbers += tensor.numel()
    if piece:
        yield piece


@dataclass(frozen=True)
class Place:
    """Numbers that are rounded, among all of a run: no two are rounded by the same chance."""

    step: int
    """Update."""
    piece: int
    """What is widened at once in it."""
    start: int = 0
    """Numbers of the piece before these, where a part of it is widened alone."""


@dataclass(frozen=True)
class Rounding:
    """Rounds float32 to 16 bits: by chance, as the seed, the update and the place of each number say, or to the
    nearest. No state: a run that goes on rounds as one that was never stopped."""

    stochastic: bool
    seed: int = 0

    def narrowed(self, wide_N: Tensor, dtype: torch.dtype, place: Place) -> Tensor:
        """[N] of `dtype` from finite float32 numbers; those that `dtype` holds stay what they are."""
        if not self.stochastic:
            return wide_N.to(dtype)
        key = keys.words(self.seed, "rounding", place.step, place.piece, count=1)[0]
        bits_N = random_bits(len(wide_N), key, wide_N.device, place.start)
        lost = 16 if dtype == torch.bfloat16 else 13  # bits of float32's mantissa that the type has not
        small_N = _on_grid(wide_N, bits_N) if dtype in _SMALLEST_NORMAL else None
        # Sign and magnitude stand apart in a float, so a random number below the unit that is kept, added to the
        # magnitude, carries into it with the odds of the part that is cut off then. In place: memory is what it costs.
        bits_N.bitwise_and_((1 << lost) - 1).add_(wide_N.view(torch.int32)).bitwise_and_(-(1 << lost))
        rounded_N = bits_N.view(torch.float32)
        if small_N is not None:
            rounded_N = torch.where(wide_N.abs() < _SMALLEST_NORMAL[dtype], small_N, rounded_N)
        return rounded_N.to(dtype)


def _on_grid(wide_N: Tensor, bits_N: Tensor) -> Tensor:
    """float16 below its smallest normal number: multiples of 2^-24."""
    share_N = (bits_N & 0xFFFFFF).to(torch.float32) * 2.0**-24
    return torch.floor(wide_N * 2.0**24 + share_N) * 2.0**-24


def random_bits(count: int, key: int, device: torch.device, start: int = 0) -> Tensor:
    """[count] int32 from number `start` on, number i a function of the key (64 bits) and i, the same on every device.

    A keyed form of the 32-bit finaliser `lowbias32` (Wellons 2018): products and shifts of whole numbers that wrap.
    """
    first, second = (int(part) - (int(part) >> 31 << 32) for part in (int(key) & 0xFFFFFFFF, int(key) >> 32))
    x_N = torch.arange(start, start + count, dtype=torch.int32, device=device).add_(first)
    shifted_N = torch.empty_like(x_N)

    def fold(places: int) -> None:
        torch.bitwise_right_shift(x_N, places, out=shifted_N)
        x_N.bitwise_xor_(shifted_N.bitwise_and_((1 << 32 - places) - 1))  # the shift keeps the sign: it is masked

    fold(16)
    x_N.mul_(0x7FEB352D)
    fold(15)
    x_N.bitwise_xor_(second).mul_(0x846CA68B - (1 << 32))
    fold(16)
    return x_N


@contextmanager
def widened(
    parameters: Sequence[nn.Parameter], factor: Tensor | None, rounding: Rounding, place: Place
) -> Iterator[None]:
    """Within the context these parameters, and their gradients times `factor`, are float32; then the parameters are
    put back into their own memory, those of 16 bits rounded. The gradients are gone. After an error the parameters are
    what they were."""
    if not parameters:
        yield
        return
    stored = [p.data for p in parameters]
    buffer_N, wide = _flat(stored)
    with_gradient = [(p, p.grad) for p in parameters if p.grad is not None]
    gradients = _flat([gradient for _, gradient in with_gradient])[1]
    if factor is not None and gradients:
        torch._foreach_mul_(gradients, factor)
    try:
        for p, value in zip(parameters, wide, strict=True):
            # The old gradient first, the new one last: torch refuses a gradient of another type than its parameter.
            p.grad, p.data = None, value
        for (p, _), gradient in zip(with_gradient, gradients, strict=True):
            p.grad = gradient
        yield
        few = next((value.dtype for value in stored if narrow(value)), None)
        if few is None:
            # Into the memory of before: FSDP2 and the averages refer to it.
            torch._foreach_copy_(stored, wide)
        else:
            rounded = _views(rounding.narrowed(buffer_N, few, place), stored)
            # A weight that stays float32 takes no part in chance, wherever it stands among the others.
            each = zip(stored, rounded, wide, strict=True)
            torch._foreach_copy_(stored, [few_bits if narrow(value) else exact for value, few_bits, exact in each])
    finally:
        for p, value in zip(parameters, stored, strict=True):
            p.grad, p.data = None, value


def _flat(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """One float32 buffer with copies of all tensors, and each copy in its shape."""
    if not tensors:
        return torch.empty(0), []
    buffer_N = torch.zeros(sum(room(t) for t in tensors), dtype=torch.float32, device=tensors[0].device)
    copies = _views(buffer_N, tensors)
    torch._foreach_copy_(copies, list(tensors))
    return buffer_N, copies


def _views(buffer_N: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = buffer_N.split([room(t) for t in tensors])
    return [part[: t.numel()].view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def room(tensor: Tensor) -> int:
    """Numbers that a tensor takes in a flat buffer."""
    return -(-tensor.numel() // _ALIGNED) * _ALIGNED
