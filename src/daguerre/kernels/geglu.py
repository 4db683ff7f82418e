"""GEGLU (Shazeer 2020): the first half of the features times GELU of the second half, as one operator.

torch's own operators write GELU of the gate, and keep it and both halves for the backward pass; here nothing but the
input is kept. A custom operator of torch: `torch.compile` and tensors without memory see shapes alone. The plain form
is what computes on a CPU, and the oracle of the tests.

Shape letters: N rows, D features of the result.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from daguerre.kernels import available


def plain(x: Tensor) -> Tensor:
    """The same by torch's own operators."""
    values, gate = x.chunk(2, dim=-1)
    return values * F.gelu(gate)


def geglu(x: Tensor) -> Tensor:
    """[..., D] from [..., 2 D], in the type of `x`; computed in float32 at least. RuntimeError for an odd width."""
    if x.shape[-1] % 2:  # not torch._check, whose message torch.compile cannot trace: each call would break the graph
        raise RuntimeError(f"{x.shape[-1]} features do not halve")
    return _forward(x)


@torch.library.custom_op("daguerre::geglu", mutates_args=())
def _forward(x: Tensor) -> Tensor:
    if available.triton(x.device):
        return available.module("geglu_triton").forward(x.contiguous())
    return plain(x.to(_wide(x))).to(x.dtype)


@_forward.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.custom_op("daguerre::geglu_backward", mutates_args=())
def _backward(dy: Tensor, x: Tensor) -> Tensor:
    if available.triton(x.device):
        return available.module("geglu_triton").backward(dy.contiguous(), x.contiguous())
    values, gate = x.to(_wide(x)).chunk(2, dim=-1)
    below = 0.5 * (1.0 + torch.erf(gate * math.sqrt(0.5)))
    slope = below + gate * torch.exp(-0.5 * gate * gate) / math.sqrt(2.0 * math.pi)
    return torch.cat([dy * gate * below, dy * values * slope], -1).to(x.dtype)


@_backward.register_fake
def _(dy: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> Tensor:
    return _backward(dy, *ctx.saved_tensors)


_forward.register_autograd(_gradients, setup_context=_keep)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
