"""The Triton kernels of `geglu`, forward and backward: each number is read once and written once.

Shape letters: N rows, D features of the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daguerre.kernels.triton.tiles import loaded, whole_columns

_NUMBERS, _WARPS = 1024, 4
"""Numbers that a program computes, and its warps. All such numbers are the fastest on an H200 of several."""
_COLUMNS, _FEWEST_COLUMNS = 256, 16
"""Features of a row that a program computes: as many as divide its width, so that no lane stays empty."""


def forward(x: Tensor) -> Tensor:
    """[..., D] from contiguous [..., 2 D]."""
    D = x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], D))
    if y.numel():
        N, rows, columns, grid = _cut(y)
        _geglu[grid](x, y, N, D, DOUBLE=x.dtype == torch.float64, ROWS=rows, COLUMNS=columns, num_warps=_WARPS)
    return y


def backward(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient [..., 2 D] of x; both are contiguous."""
    D = x.shape[-1] // 2
    dx = torch.empty_like(x)
    if dy.numel():
        N, rows, columns, grid = _cut(dy)
        _geglu_back[grid](
            dy, x, dx, N, D, DOUBLE=x.dtype == torch.float64, ROWS=rows, COLUMNS=columns, num_warps=_WARPS
        )
    return dx


def _cut(y: Tensor) -> tuple[int, int, int, tuple[int, int]]:
    """N, rows and columns of a program, and the grid of programs."""
    D = y.shape[-1]
    columns = whole_columns(D, _COLUMNS, _FEWEST_COLUMNS)
    N, rows = y.numel() // D, max(1, _NUMBERS // columns)
    return N, rows, columns, (triton.cdiv(N, rows), triton.cdiv(D, columns))


@triton.jit
def _below(gate):
    """Share of a normal distribution below `gate`; GELU is the gate times this."""
    return 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))


@triton.jit
def _place(N, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first row of this program, features and rows from there, and the mask of the numbers that exist."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    r, d = tl.arange(0, ROWS)[:, None], (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    return first, r, d, (first + r < N) & (d < D)


@triton.jit
def _geglu(x, y, N, D, DOUBLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first, r, d, there = _place(N, D, ROWS, COLUMNS)
    values = loaded(x + first * 2 * D, r * 2 * D + d, there, DOUBLE)
    gate = loaded(x + first * 2 * D, r * 2 * D + D + d, there, DOUBLE)
    tl.store(y + first * D + r * D + d, (values * gate * _below(gate)).to(y.dtype.element_ty), mask=there)


@triton.jit
def _geglu_back(dy, x, dx, N, D, DOUBLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first, r, d, there = _place(N, D, ROWS, COLUMNS)
    values = loaded(x + first * 2 * D, r * 2 * D + d, there, DOUBLE)
    gate = loaded(x + first * 2 * D, r * 2 * D + D + d, there, DOUBLE)
    given = loaded(dy + first * D, r * D + d, there, DOUBLE)
    below = _below(gate)
    slope = below + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    at = dx + first * 2 * D + r * 2 * D + d
    tl.store(at, (given * gate * below).to(dx.dtype.element_ty), mask=there)
    tl.store(at + D, (given * values * slope).to(dx.dtype.element_ty), mask=there)
