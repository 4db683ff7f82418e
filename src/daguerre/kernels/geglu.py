"""GEGLU (Shazeer 2020): the first half of the features times GELU of the second half, as one operator.

torch's own operators write GELU of the gate, and keep it and both halves for the backward pass; here nothing but the
input is kept. The plain form is what computes on a CPU, and the oracle of the tests.

Shape letters: N rows, D features of the result.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from daguerre.kernels import available
from daguerre.kernels.operators import operator, wide_type


def plain(x: Tensor) -> Tensor:
    """The same by torch's own operators."""
    values, gate = x.chunk(2, dim=-1)
    return values * F.gelu(gate)


def geglu(x: Tensor) -> Tensor:
    """[..., D] from [..., 2 D], in the type of `x`; computed in float32 at least. RuntimeError for an odd width."""
    if x.shape[-1] % 2:  # not torch._check, whose message torch.compile cannot trace: each call would break the graph
        raise RuntimeError(f"{x.shape[-1]} features do not halve")
    result: Tensor = _Geglu.apply(x)
    return result


def _compute(x: Tensor) -> Tensor:
    if available.triton(x.device):
        return available.module("geglu").forward(x.contiguous())
    return plain(x.to(wide_type(x))).to(x.dtype)


def _shapes(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _compute_back(dy: Tensor, x: Tensor) -> Tensor:
    if available.triton(x.device):
        return available.module("geglu").backward(dy.contiguous(), x.contiguous())
    values, gate = x.to(wide_type(x)).chunk(2, dim=-1)
    below = 0.5 * (1.0 + torch.erf(gate * math.sqrt(0.5)))
    slope = below + gate * torch.exp(-0.5 * gate * gate) / math.sqrt(2.0 * math.pi)
    return torch.cat([dy * gate * below, dy * values * slope], -1).to(x.dtype)


def _shapes_back(dy: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_forward = operator("geglu(Tensor x) -> Tensor", _compute, _shapes)
_backward = operator("geglu_backward(Tensor dy, Tensor x) -> Tensor", _compute_back, _shapes_back)


class _Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return _forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _backward(dy, *ctx.saved_tensors)
