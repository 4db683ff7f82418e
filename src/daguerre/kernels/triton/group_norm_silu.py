"""The Triton kernels of `group_norm_silu`, forward and backward. Images lie as rows of channels, one row a place.

Each pass has three steps. Sums: a program reads some rows of some channels of one image and writes what it found
for each channel. Meeting: a program puts together, in order, what was found for one group of one image. Writing: a
program computes some rows of the result. No program writes what another one reads, so every run gives the same bits.

Shape letters: B images, C channels, S places (height x width), G groups, P parts into which the places are cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daguerre.kernels.triton.tiles import loaded, tile, whole_columns

_NUMBERS, _WARPS = 8192, 4
"""Numbers of an image that a program holds, and its warps. All such numbers are the fastest on an H200 of several."""
_NUMBERS_BACK, _WARPS_BACK = 4096, 4
"""Of programs that hold two images, and of those that write one."""
_COLUMNS, _FEWEST_COLUMNS = 64, 32
"""Channels that a program holds: 64 to 128 bytes that lie together."""
_TOGETHER = 32
"""Parts that the second step reads at a time."""


def forward(
    x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, groups: int, epsilon: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Result, mean and 1 / deviation [B, G]; `x_BCHW` has its channels last in memory."""
    B, C, S, rows, columns = _cut(x_BCHW, _NUMBERS)
    wide, double = _wide(x_BCHW)
    parts, across, size = triton.cdiv(S, rows), triton.cdiv(C, columns), C // groups
    found_2BPC = x_BCHW.new_empty((2, B, parts, C), dtype=wide)
    mean_BG, rstd_BG = (x_BCHW.new_empty((B, groups), dtype=wide) for _ in range(2))
    y_BCHW = torch.empty_like(x_BCHW, memory_format=torch.channels_last)
    _sums[(parts, across, B)](x_BCHW, found_2BPC, B, S, C, ROWS=rows, COLUMNS=columns, DOUBLE=double, num_warps=_WARPS)
    _meet[(groups, B)](
        found_2BPC, mean_BG, rstd_BG, S, C, groups, size, parts, epsilon,
        TOGETHER=_TOGETHER, SPAN=rows, SIZE=triton.next_power_of_2(size), DOUBLE=double,
    )  # fmt: skip
    rows = _cut(x_BCHW, _NUMBERS_BACK)[3]
    _write[(triton.cdiv(S, rows), across, B)](
        x_BCHW, y_BCHW, weight_C, bias_C, mean_BG, rstd_BG, S, C, groups, size,
        SILU=silu, ROWS=rows, COLUMNS=columns, DOUBLE=double, num_warps=_WARPS_BACK,
    )  # fmt: skip
    return y_BCHW, mean_BG, rstd_BG


def backward(
    dy_BCHW: Tensor, x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, mean_BG: Tensor, rstd_BG: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; `dy_BCHW` and `x_BCHW` have their channels last in memory."""
    B, C, S, rows, columns = _cut(x_BCHW, _NUMBERS_BACK)
    wide, double = _wide(x_BCHW)
    groups = mean_BG.shape[1]
    parts, across, size = triton.cdiv(S, rows), triton.cdiv(C, columns), C // groups
    found_2BPC = x_BCHW.new_empty((2, B, parts, C), dtype=wide)
    whole_2BC, of_group_2BG = (x_BCHW.new_empty((2, B, n), dtype=wide) for n in (C, groups))
    dx_BCHW = torch.empty_like(x_BCHW, memory_format=torch.channels_last)
    _sums_back[(parts, across, B)](
        dy_BCHW, x_BCHW, found_2BPC, weight_C, bias_C, mean_BG, rstd_BG, B, S, C, groups, size,
        SILU=silu, ROWS=rows, COLUMNS=columns, DOUBLE=double, num_warps=_WARPS_BACK,
    )  # fmt: skip
    _meet_back[(groups, B)](
        found_2BPC, whole_2BC, of_group_2BG, weight_C, B, C, groups, size, parts,
        TOGETHER=_TOGETHER, SIZE=triton.next_power_of_2(size), DOUBLE=double,
    )  # fmt: skip
    _write_back[(parts, across, B)](
        dy_BCHW, x_BCHW, dx_BCHW, weight_C, bias_C, mean_BG, rstd_BG, of_group_2BG, B, S, C, groups, size,
        SILU=silu, ROWS=rows, COLUMNS=columns, DOUBLE=double, num_warps=2 * _WARPS_BACK,
    )  # fmt: skip
    return dx_BCHW, whole_2BC[1].sum(0).to(weight_C.dtype), whole_2BC[0].sum(0).to(bias_C.dtype)


def _cut(x_BCHW: Tensor, numbers: int) -> tuple[int, int, int, int, int]:
    """B, C, S, and how many rows and columns a program holds."""
    B, C, H, W = x_BCHW.shape
    columns = whole_columns(C, _COLUMNS, _FEWEST_COLUMNS)
    rows = max(1, min(numbers // columns, triton.next_power_of_2(H * W)))
    return B, C, H * W, rows, columns


def _wide(x_BCHW: Tensor) -> tuple[torch.dtype, bool]:
    double = x_BCHW.dtype == torch.float64
    return (torch.float64 if double else torch.float32), double


@triton.jit
def _line(weight, bias, mean, rstd, b, c, C, groups, size, DOUBLE: tl.constexpr):
    """Weight, bias, mean and 1 / deviation of channels of one image."""
    there = c < C
    of = b * groups + c // size
    return (
        loaded(weight, c, there, DOUBLE)[None, :], loaded(bias, c, there, DOUBLE)[None, :],
        loaded(mean, of, there, DOUBLE)[None, :], loaded(rstd, of, there, DOUBLE)[None, :],
    )  # fmt: skip


@triton.jit
def _sums(x, found, B, S, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOUBLE: tl.constexpr):
    """Mean and sum of squared distances from it, of each channel over the rows of a part."""
    image, c, at, there = tile(S, C, ROWS, COLUMNS)
    v = loaded(x + image, at, there, DOUBLE)
    mean = tl.sum(v, 0) / tl.minimum(ROWS, S - tl.program_id(0) * ROWS)
    away = tl.where(there, v - mean[None, :], 0.0)
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(found + part * C + c, mean, mask=c < C)
    part += tl.num_programs(0).to(tl.int64) * B
    tl.store(found + part * C + c, tl.sum(away * away, 0), mask=c < C)


@triton.jit
def _meet(
    found, mean, rstd, S, C, groups, size, parts, epsilon,
    TOGETHER: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """Mean and deviation of one group: means and squared distances of its parts together (Chan et al. 1979)."""
    g, b = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, SIZE)[None, :]
    total = tl.zeros((TOGETHER, SIZE), tl.float64 if DOUBLE else tl.float32)
    for part in range(0, parts, TOGETHER):
        p = part + tl.arange(0, TOGETHER)[:, None]
        at = (b.to(tl.int64) * parts + p) * C + g * size + k
        there = (p < parts) & (k < size)
        total += loaded(found, at, there, DOUBLE) * tl.minimum(SPAN, S - p * SPAN)
    middle = tl.sum(tl.sum(total, 0), 0) / (S * size)
    squares = tl.zeros((TOGETHER, SIZE), tl.float64 if DOUBLE else tl.float32)
    for part in range(0, parts, TOGETHER):
        p = part + tl.arange(0, TOGETHER)[:, None]
        at = (b.to(tl.int64) * parts + p) * C + g * size + k
        there = (p < parts) & (k < size)
        away = tl.where(there, loaded(found, at, there, DOUBLE) - middle, 0.0)
        inner = loaded(found + tl.num_programs(1).to(tl.int64) * parts * C, at, there, DOUBLE)
        squares += inner + away * away * tl.minimum(SPAN, S - p * SPAN)
    variance = tl.sum(tl.sum(squares, 0), 0) / (S * size)
    tl.store(mean + b * groups + g, middle)
    tl.store(rstd + b * groups + g, 1.0 / tl.sqrt(variance + epsilon))


@triton.jit
def _write(
    x, y, weight, bias, mean, rstd, S, C, groups, size,
    SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """Norm, weight, bias and SiLU of a block of rows."""
    image, c, at, there = tile(S, C, ROWS, COLUMNS)
    v = loaded(x + image, at, there, DOUBLE)
    w, shift, middle, scale = _line(weight, bias, mean, rstd, tl.program_id(2), c, C, groups, size, DOUBLE)
    z = (v - middle) * (scale * w) + shift
    if SILU:
        z = z / (1.0 + tl.exp(-z))
    tl.store(y + image + at, z.to(y.dtype.element_ty), mask=there)


@triton.jit
def _before_silu(
    dy, x, at, there, w, shift, middle, scale,
    SILU: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """The gradient behind weight and bias, and the normed image, of a block; both 0 where the block has none."""
    normed = tl.where(there, (loaded(x, at, there, DOUBLE) - middle) * scale, 0.0)
    dz = loaded(dy, at, there, DOUBLE)
    if SILU:
        z = normed * w + shift
        gate = 1.0 / (1.0 + tl.exp(-z))
        dz = dz * gate * (1.0 + z * (1.0 - gate))
    return dz, normed


@triton.jit
def _sums_back(
    dy, x, found, weight, bias, mean, rstd, B, S, C, groups,
    size, SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient and of gradient times normed image, of each channel over the rows of a part."""
    image, c, at, there = tile(S, C, ROWS, COLUMNS)
    w, shift, middle, scale = _line(weight, bias, mean, rstd, tl.program_id(2), c, C, groups, size, DOUBLE)
    dz, normed = _before_silu(dy + image, x + image, at, there, w, shift, middle, scale, SILU, DOUBLE)
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(found + part * C + c, tl.sum(dz, 0), mask=c < C)
    part += tl.num_programs(0).to(tl.int64) * B
    tl.store(found + part * C + c, tl.sum(dz * normed, 0), mask=c < C)


@triton.jit
def _meet_back(
    found, whole, of_group, weight, B, C, groups, size, parts,
    TOGETHER: tl.constexpr, SIZE: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """The same sums over all rows of one image: of each channel of a group, and of the group by its weights."""
    g, b = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, SIZE)
    w = loaded(weight, g * size + k, k < size, DOUBLE)
    for which in range(2):
        total = tl.zeros((TOGETHER, SIZE), tl.float64 if DOUBLE else tl.float32)
        for part in range(0, parts, TOGETHER):
            p = part + tl.arange(0, TOGETHER)[:, None]
            at = ((which * B + b).to(tl.int64) * parts + p) * C + g * size + k[None, :]
            total += loaded(found, at, (p < parts) & (k[None, :] < size), DOUBLE)
        sums = tl.sum(total, 0)
        tl.store(whole + (which * B + b) * C + g * size + k, sums, mask=k < size)
        tl.store(of_group + (which * B + b) * groups + g, tl.sum(sums * w, 0))


@triton.jit
def _write_back(
    dy, x, dx, weight, bias, mean, rstd, of_group, B, S, C,
    groups, size, SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of rows (the closed form of Ioffe and Szegedy 2015, over groups)."""
    image, c, at, there = tile(S, C, ROWS, COLUMNS)
    b = tl.program_id(2)
    w, shift, middle, scale = _line(weight, bias, mean, rstd, b, c, C, groups, size, DOUBLE)
    dz, normed = _before_silu(dy + image, x + image, at, there, w, shift, middle, scale, SILU, DOUBLE)
    of = b * groups + c // size
    plain = loaded(of_group, of, c < C, DOUBLE)[None, :] * scale / (S * size)
    times = loaded(of_group + B * groups, of, c < C, DOUBLE)[None, :] * scale / (S * size)
    d = dz * (w * scale) - (plain + normed * times)
    tl.store(dx + image + at, d.to(dx.dtype.element_ty), mask=there)
