"""The Triton kernels of `layer_norm` and `rms_norm`, forward and backward: each number is read once and written once.

Backward, a program goes over many blocks of rows, always the same ones, and sums the gradients of weight and bias over
them, so that every run gives the same bits.

Shape letters: N rows, D features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daguerre.kernels.triton.tiles import loaded

_NUMBERS, _WARPS = 4096, 4
"""Numbers that a program holds at a time, and its warps. All such numbers are the fastest on an H200 of several."""
_NUMBERS_BACK, _WARPS_BACK = 2048, 4
"""The same, backward. A longer row, which one program holds alone, has warps in proportion."""
_PROGRAMS = 1056
"""Of the backward pass, at most: what a GPU of today computes at a time, and the rows of the sums that they write."""


def forward(
    x: Tensor,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    epsilon: float,
    dtype: torch.dtype | None = None,
    centred: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """[..., D] of a type, else of that of x, which is contiguous; mean and 1 / deviation of each row, [N]. If not
    `centred`, there is no mean, and the deviation is that from 0."""
    N, D, wide, double = _cut(x)
    y = torch.empty_like(x, dtype=dtype)
    mean_N, rstd_N = x.new_empty(N, dtype=wide) if centred else None, x.new_empty(N, dtype=wide)
    width, rows, more = _block(D, _NUMBERS)
    if x.numel():
        _forward[(triton.cdiv(N, rows),)](
            x, y, weight_D, bias_D, mean_N, rstd_N, N, D, epsilon,
            MEAN=centred, WEIGHT=weight_D is not None, BIAS=bias_D is not None,
            ROWS=rows, WIDTH=width, DOUBLE=double, num_warps=_WARPS * more,
        )  # fmt: skip
    return y, mean_N, rstd_N


def backward(
    dy: Tensor,
    x: Tensor,
    weight_D: Tensor | None,
    mean_N: Tensor | None,
    rstd_N: Tensor,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias; None for one of the latter that is not asked for. `mean_N` as `forward` gave
    it."""
    N, D, wide, double = _cut(x)
    dx = torch.empty_like(x)
    width, rows, more = _block(D, _NUMBERS_BACK)
    programs = max(1, min(_PROGRAMS, triton.cdiv(N, rows)))
    # Sums over rows are held as long as the rows are.
    warps = min(32, _WARPS_BACK * more * (2 if more > 1 and (of_weight or of_bias) else 1))
    found_2PD = x.new_empty((2, programs if x.numel() else 0, D), dtype=wide) if of_weight or of_bias else None
    if x.numel():
        _backward[(programs,)](
            dy, x, dx, weight_D, mean_N, rstd_N, found_2PD, N, D,
            MEAN=mean_N is not None, WEIGHT=weight_D is not None, SUMS=found_2PD is not None,
            ROWS=rows, WIDTH=width, DOUBLE=double, num_warps=warps,
        )  # fmt: skip
    if found_2PD is None:
        return dx, None, None
    # Of an operator no result may be a view of another one.
    return dx, found_2PD[0].sum(0) if of_weight else None, found_2PD[1].sum(0) if of_bias else None


def _cut(x: Tensor) -> tuple[int, int, torch.dtype, bool]:
    """N, D, and the type of the arithmetic."""
    D, double = x.shape[-1], x.dtype == torch.float64
    return x.numel() // max(D, 1), D, torch.float64 if double else torch.float32, double


def _block(D: int, numbers: int) -> tuple[int, int, int]:
    """Width and rows of what a program holds, and how many times `numbers` that is."""
    width = triton.next_power_of_2(D)
    return width, max(1, numbers // width), min(8, max(1, width // numbers))


@triton.jit
def _forward(
    x, y, weight, bias, mean, rstd, N, D, epsilon, MEAN: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    r, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    exists = first + r < N
    at, there = r[:, None] * D + d[None, :], exists[:, None] & (d[None, :] < D)
    v = loaded(x + first * D, at, there, DOUBLE)
    away = v
    if MEAN:
        middle = tl.sum(v, 1) / D
        away = tl.where(there, v - middle[:, None], 0.0)
        tl.store(mean + first + r, middle, mask=exists)
    scale = 1.0 / tl.sqrt(tl.sum(away * away, 1) / D + epsilon)
    z = away * scale[:, None]
    if WEIGHT:
        z = z * loaded(weight, d, d < D, DOUBLE)[None, :]
    if BIAS:
        z = z + loaded(bias, d, d < D, DOUBLE)[None, :]
    tl.store(y + first * D + at, z.to(y.dtype.element_ty), mask=there)
    tl.store(rstd + first + r, scale, mask=exists)


@triton.jit
def _backward(
    dy, x, dx, weight, mean, rstd, found, N, D, MEAN: tl.constexpr, WEIGHT: tl.constexpr,
    SUMS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    r, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    if WEIGHT:
        w = loaded(weight, d, d < D, DOUBLE)[None, :]
    times = tl.zeros((ROWS, WIDTH), tl.float64 if DOUBLE else tl.float32)
    plain = tl.zeros((ROWS, WIDTH), tl.float64 if DOUBLE else tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for _ in range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0)):
        exists = first + r < N
        at, there = r[:, None] * D + d[None, :], exists[:, None] & (d[None, :] < D)
        v, given = loaded(x + first * D, at, there, DOUBLE), loaded(dy + first * D, at, there, DOUBLE)
        scale = loaded(rstd + first, r, exists, DOUBLE)
        if MEAN:
            v = tl.where(there, v - loaded(mean + first, r, exists, DOUBLE)[:, None], 0.0)
        z = v * scale[:, None]
        if SUMS:
            times += given * z
            plain += given
        if WEIGHT:
            given = given * w
        inner = tl.sum(given * z, 1) / D
        if MEAN:
            given = given - (tl.sum(given, 1) / D)[:, None]
        back = (given - z * inner[:, None]) * scale[:, None]
        tl.store(dx + first * D + at, back.to(dx.dtype.element_ty), mask=there)
        first += tl.num_programs(0).to(tl.int64) * ROWS
    if SUMS:
        at = tl.program_id(0).to(tl.int64) * D + d
        tl.store(found + at, tl.sum(times, 0), mask=d < D)
        tl.store(found + tl.num_programs(0).to(tl.int64) * D + at, tl.sum(plain, 0), mask=d < D)
