"""The Triton kernel of `rotary`, forward and backward: each number is read once and written once.

Shape letters: N rows (samples, tokens and heads), P rows of the table of places, D features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daguerre.kernels.triton.tiles import loaded

_NUMBERS, _WARPS = 2048, 4
"""Numbers that a program holds at a time, and its warps."""


def turned(x: Tensor, cos_PD: Tensor, sin_PD: Tensor | None, inner: int, halves: bool, back: bool) -> Tensor:
    """[..., D] of the type of x; all are contiguous and not empty. Without sines the table has both of each pair."""
    D, y = x.shape[-1], torch.empty_like(x)
    N, width = x.numel() // D, triton.next_power_of_2(D)
    rows = max(1, _NUMBERS // width)
    _turn[(triton.cdiv(N, rows),)](
        x, y, cos_PD, cos_PD if sin_PD is None else sin_PD, N, cos_PD.numel() // D, inner, D,
        PAIRED=sin_PD is None, HALVES=halves, BACK=back, ROWS=rows, WIDTH=width, DOUBLE=x.dtype == torch.float64,
        num_warps=_WARPS,
    )  # fmt: skip
    return y


@triton.jit
def _turn(
    x, y, cos, sin, N, P, inner, D, PAIRED: tl.constexpr, HALVES: tl.constexpr,
    BACK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    r = tl.arange(0, ROWS)
    exists = (first + r < N)[:, None]
    place = ((((first + r) // inner) % P) * D)[:, None]
    if HALVES:
        i = tl.arange(0, WIDTH // 2)[None, :]
        at, other, there = r[:, None] * D + i, D // 2, exists & (i < D // 2)
        a, b = loaded(x + first * D, at, there, DOUBLE), loaded(x + first * D + other, at, there, DOUBLE)
        cos_a, cos_b = loaded(cos, place + i, there, DOUBLE), loaded(cos + other, place + i, there, DOUBLE)
        sin_a, sin_b = loaded(sin, place + i, there, DOUBLE), loaded(sin + other, place + i, there, DOUBLE)
    else:
        d = tl.arange(0, WIDTH)[None, :]
        at, there = r[:, None] * D + d, exists & (d < D)
        a, b = _pairs(loaded(x + first * D, at, there, DOUBLE), ROWS, WIDTH)
        cos_a, cos_b = _pairs(loaded(cos, place + d, there, DOUBLE), ROWS, WIDTH)
        if PAIRED:
            sin_a, sin_b = cos_b, cos_b
            cos_b = cos_a
        else:
            sin_a, sin_b = _pairs(loaded(sin, place + d, there, DOUBLE), ROWS, WIDTH)
    if BACK:
        turned_a, turned_b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        turned_a, turned_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    kind = y.dtype.element_ty
    if HALVES:
        tl.store(y + first * D + at, turned_a.to(kind), mask=there)
        tl.store(y + first * D + other + at, turned_b.to(kind), mask=there)
    else:
        whole = tl.reshape(tl.join(turned_a.to(kind), turned_b.to(kind)), (ROWS, WIDTH))
        tl.store(y + first * D + at, whole, mask=there)


@triton.jit
def _pairs(numbers, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The first and the second number of each two neighbours."""
    return tl.split(tl.reshape(numbers, (ROWS, WIDTH // 2, 2)))
