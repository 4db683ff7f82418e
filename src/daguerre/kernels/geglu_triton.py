"""The Triton kernels of `geglu`, forward and backward: each number is read once and written once.

Shape letters: N rows, D features of the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Numbers that one program computes."""


def forward(x: Tensor) -> Tensor:
    """[..., D] from contiguous [..., 2 D]."""
    D = x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], D))
    if y.numel():
        _geglu[(y.numel() // D, triton.cdiv(D, _BLOCK))](x, y, D, DOUBLE=x.dtype == torch.float64, BLOCK=_BLOCK)
    return y


def backward(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient [..., 2 D] of x; both are contiguous."""
    D = x.shape[-1] // 2
    dx = torch.empty_like(x)
    if dy.numel():
        _geglu_back[(dy.numel() // D, triton.cdiv(D, _BLOCK))](
            dy, x, dx, D, DOUBLE=x.dtype == torch.float64, BLOCK=_BLOCK
        )
    return dx


@triton.jit
def _below(gate):
    """Share of a normal distribution below `gate`; GELU is the gate times this."""
    return 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))


@triton.jit
def _loaded(pointer, at, there, DOUBLE: tl.constexpr):
    return tl.load(pointer + at, mask=there, other=0.0).to(tl.float64 if DOUBLE else tl.float32)


@triton.jit
def _geglu(x, y, D, DOUBLE: tl.constexpr, BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = _loaded(x, row * 2 * D + d, d < D, DOUBLE)
    gate = _loaded(x, row * 2 * D + D + d, d < D, DOUBLE)
    tl.store(y + row * D + d, (values * gate * _below(gate)).to(y.dtype.element_ty), mask=d < D)


@triton.jit
def _geglu_back(dy, x, dx, D, DOUBLE: tl.constexpr, BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = _loaded(x, row * 2 * D + d, d < D, DOUBLE)
    gate = _loaded(x, row * 2 * D + D + d, d < D, DOUBLE)
    given = _loaded(dy, row * D + d, d < D, DOUBLE)
    below = _below(gate)
    slope = below + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    tl.store(dx + row * 2 * D + d, (given * gate * below).to(dx.dtype.element_ty), mask=d < D)
    tl.store(dx + row * 2 * D + D + d, (given * values * slope).to(dx.dtype.element_ty), mask=d < D)
