"""The Triton kernels of `response_norm`, forward and backward. Images lie as rows of channels, one row a place.

Each pass reads the image twice: a program of the first step sums over some rows of some channels of one image, one of
the second computes some rows of the result. What is between them are numbers of channels, by torch's operators. No
program writes what another one reads, so every run gives the same bits.

Shape letters: B images, S places (height x width), C channels, P parts into which the places are cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daguerre.kernels.triton.tiles import loaded, tile

_ROWS, _COLUMNS, _WARPS = 64, 64, 4
"""What a program of the sums holds. All such numbers are the fastest on an H200 of several."""
_ROWS_OUT, _COLUMNS_OUT = 32, 128
"""What a program that writes numbers holds."""


def squares(x_BHWC: Tensor, gelu: bool) -> Tensor:
    """Sums of squares over the places, [B, 1, 1, C]; of GELU of x with `gelu`."""
    B, S, C, wide, double = _cut(x_BHWC)
    found_BPC = x_BHWC.new_empty((B, triton.cdiv(S, _ROWS), C), dtype=wide)
    if x_BHWC.numel():
        _squares[_grid(B, S, C)](
            x_BHWC, found_BPC, S, C, GELU=gelu, ROWS=_ROWS, COLUMNS=_COLUMNS, DOUBLE=double, num_warps=_WARPS
        )
    return found_BPC.sum(1)[:, None, None]


def scaled(x_BHWC: Tensor, scale_B11C: Tensor, beta_C: Tensor, gelu: bool) -> Tensor:
    """scale x + beta, in the type of x."""
    B, S, C, _, double = _cut(x_BHWC)
    y_BHWC = torch.empty_like(x_BHWC)
    if x_BHWC.numel():
        _scaled[_grid(B, S, C, _ROWS_OUT, _COLUMNS_OUT)](
            x_BHWC, y_BHWC, scale_B11C, beta_C, S, C,
            GELU=gelu, ROWS=_ROWS_OUT, COLUMNS=_COLUMNS_OUT, DOUBLE=double, num_warps=_WARPS,
        )  # fmt: skip
    return y_BHWC


def sums(dy_BHWC: Tensor, x_BHWC: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """Sums of dy x, and of dy, over the places, [B, 1, 1, C] each."""
    B, S, C, wide, double = _cut(x_BHWC)
    found_2BPC = x_BHWC.new_empty((2, B, triton.cdiv(S, _ROWS), C), dtype=wide)
    if x_BHWC.numel():
        _sums[_grid(B, S, C)](
            dy_BHWC, x_BHWC, found_2BPC, B, S, C,
            GELU=gelu, ROWS=_ROWS, COLUMNS=_COLUMNS, DOUBLE=double, num_warps=_WARPS,
        )  # fmt: skip
    times_B11C, plain_B11C = found_2BPC.sum(2)[:, :, None, None]
    return times_B11C, plain_B11C


def gradient(dy_BHWC: Tensor, x_BHWC: Tensor, scale_B11C: Tensor, slope_B11C: Tensor, gelu: bool) -> Tensor:
    """The gradient of x: dy scale + x slope, behind GELU's."""
    B, S, C, _, double = _cut(x_BHWC)
    dx_BHWC = torch.empty_like(x_BHWC)
    if x_BHWC.numel():
        _gradient[_grid(B, S, C, _ROWS_OUT, _COLUMNS_OUT)](
            dy_BHWC, x_BHWC, dx_BHWC, scale_B11C, slope_B11C, S, C,
            GELU=gelu, ROWS=_ROWS_OUT, COLUMNS=_COLUMNS_OUT, DOUBLE=double, num_warps=_WARPS,
        )  # fmt: skip
    return dx_BHWC


def _cut(x_BHWC: Tensor) -> tuple[int, int, int, torch.dtype, bool]:
    """B, S, C, and the type of the arithmetic."""
    B, H, W, C = x_BHWC.shape
    double = x_BHWC.dtype == torch.float64
    return B, H * W, C, torch.float64 if double else torch.float32, double


def _grid(B: int, S: int, C: int, rows: int = _ROWS, columns: int = _COLUMNS) -> tuple[int, int, int]:
    return triton.cdiv(S, rows), triton.cdiv(C, columns), B


@triton.jit
def _below(u, DOUBLE: tl.constexpr):
    """Share of a normal distribution below `u`, by which GELU multiplies u; and exp(-u^2 / 2).

    In float32 by Abramowitz and Stegun 1964, 7.1.26 (1.5e-7, as near as 1 + erf comes in float32), whose exponential
    the slope needs, too: the library's erf takes longer than reading the image.
    """
    fall = tl.exp(-0.5 * u * u)
    if DOUBLE:
        below = 0.5 * (1.0 + tl.erf(u * 0.7071067811865476))
    else:
        t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(u))
        above = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t * fall
        below = tl.where(u < 0, 0.5 * above, 1.0 - 0.5 * above)
    return below, fall


@triton.jit
def _squares(
    x, found, S, C,
    GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    image, c, at, there = tile(S, C, ROWS, COLUMNS)
    v = loaded(x + image, at, there, DOUBLE)
    if GELU:
        v = v * _below(v, DOUBLE)[0]
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(found + part * C + c, tl.sum(v * v, 0), mask=c < C)


@triton.jit
def _scaled(
    x, y, scale, beta, S, C,
    GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    image, c, at, there = tile(S, C, ROWS, COLUMNS)
    v = loaded(x + image, at, there, DOUBLE)
    if GELU:
        v = v * _below(v, DOUBLE)[0]
    factor = loaded(scale + tl.program_id(2) * C, c, c < C, DOUBLE)[None, :]
    z = v * factor + loaded(beta, c, c < C, DOUBLE)[None, :]
    tl.store(y + image + at, z.to(y.dtype.element_ty), mask=there)


@triton.jit
def _sums(
    dy, x, found, B, S, C,
    GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    image, c, at, there = tile(S, C, ROWS, COLUMNS)
    v, d = loaded(x + image, at, there, DOUBLE), loaded(dy + image, at, there, DOUBLE)
    if GELU:
        v = v * _below(v, DOUBLE)[0]
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(found + part * C + c, tl.sum(d * v, 0), mask=c < C)
    part += tl.num_programs(0).to(tl.int64) * B
    tl.store(found + part * C + c, tl.sum(d, 0), mask=c < C)


@triton.jit
def _gradient(
    dy, x, dx, scale, slope, S, C,
    GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    image, c, at, there = tile(S, C, ROWS, COLUMNS)
    u, d = loaded(x + image, at, there, DOUBLE), loaded(dy + image, at, there, DOUBLE)
    factor = loaded(scale + tl.program_id(2) * C, c, c < C, DOUBLE)[None, :]
    bend = loaded(slope + tl.program_id(2) * C, c, c < C, DOUBLE)[None, :]
    if GELU:
        below, fall = _below(u, DOUBLE)
        d = (d * factor + u * below * bend) * (below + u * fall * 0.3989422804014327)
    else:
        d = d * factor + u * bend
    tl.store(dx + image + at, d.to(dx.dtype.element_ty), mask=there)
