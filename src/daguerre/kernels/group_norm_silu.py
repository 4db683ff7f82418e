"""GroupNorm (Wu and He 2018), with SiLU behind it or without, of images whose channels are last in memory.

torch's own GroupNorm on a GPU returns channels first, whatever it was given, so that each norm costs two changes of
layout in addition to its own passes and those of SiLU. Here the forward pass reads the image twice and writes it once,
in its type and layout; mean and variance are float32. Backward, the norm is computed again: only the image and two
numbers a group are kept. All sums have a fixed order. The plain
form is what computes on a CPU, and the oracle of the tests.

Shape letters: B images, C channels, H and W height and width, G groups.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from daguerre.kernels import available
from daguerre.kernels.operators import operator, wide_type

_LAST = torch.channels_last


def plain(
    x_BCHW: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, groups: int, epsilon: float, silu: bool
) -> Tensor:
    """The same by torch's own operators."""
    z_BCHW = F.group_norm(x_BCHW, groups, weight_C, bias_C, epsilon)
    return F.silu(z_BCHW) if silu else z_BCHW


def group_norm_silu(
    x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, groups: int, epsilon: float = 1e-5, silu: bool = True
) -> Tensor:
    """[B, C, H, W] of the type of `x_BCHW`, channels last in memory. Weight and bias may be of another float type.

    Under autocast torch would compute and return float32, which the next convolution rounds to its own type; here the
    one rounding is at the end. RuntimeError for what is no image or does not divide into groups.
    """
    # Not torch._check, whose message torch.compile cannot trace: each call would break the graph.
    if x_BCHW.ndim != 4:
        raise RuntimeError(f"an image has 4 dims, B C H W; got {list(x_BCHW.shape)}")
    if x_BCHW.shape[1] % groups:
        raise RuntimeError(f"{x_BCHW.shape[1]} channels do not divide into {groups} groups")
    result: Tensor = _GroupNorm.apply(x_BCHW, weight_C, bias_C, groups, epsilon, silu)
    return result


def _compute(
    x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, groups: int, epsilon: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and mean and 1 / deviation [B, G]."""
    x_BCHW = x_BCHW.contiguous(memory_format=_LAST)
    if available.triton(x_BCHW.device):
        return available.module("group_norm_silu").forward(x_BCHW, weight_C, bias_C, groups, epsilon, silu)
    wide = wide_type(x_BCHW)
    B, C, H, W = x_BCHW.shape
    # With channels last torch takes the variance as a difference of large sums on a CPU.
    y_BCHW, mean_BG, rstd_BG = torch.native_group_norm(
        x_BCHW.to(wide).contiguous(), weight_C.to(wide), bias_C.to(wide), B, C, H * W, groups, epsilon
    )
    y_BCHW = F.silu(y_BCHW) if silu else y_BCHW
    return y_BCHW.to(x_BCHW.dtype).contiguous(memory_format=_LAST), mean_BG, rstd_BG


def _shapes(
    x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, groups: int, epsilon: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    of_group = x_BCHW.new_empty((x_BCHW.shape[0], groups), dtype=wide_type(x_BCHW))
    return _like(x_BCHW), of_group, torch.empty_like(of_group)


def _compute_back(
    dy_BCHW: Tensor,
    x_BCHW: Tensor,
    weight_C: Tensor,
    bias_C: Tensor,
    mean_BG: Tensor,
    rstd_BG: Tensor,
    groups: int,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    dy_BCHW, x_BCHW = (t.contiguous(memory_format=_LAST) for t in (dy_BCHW, x_BCHW))
    if available.triton(x_BCHW.device):
        kernels = available.module("group_norm_silu")
        return kernels.backward(dy_BCHW, x_BCHW, weight_C, bias_C, mean_BG, rstd_BG, silu)
    wide = wide_type(x_BCHW)
    B, C, H, W = x_BCHW.shape
    dz_BCHW, wide_x_BCHW, w_C = dy_BCHW.to(wide), x_BCHW.to(wide), weight_C.to(wide)
    if silu:
        scale_BC1 = (rstd_BG[..., None] * w_C.view(1, groups, -1)).view(B, C, 1, 1)
        shift_BC1 = (
            bias_C.to(wide).view(1, C, 1, 1) - mean_BG.repeat_interleave(C // groups, 1).view(B, C, 1, 1) * scale_BC1
        )
        dz_BCHW = torch.ops.aten.silu_backward(dz_BCHW, wide_x_BCHW * scale_BC1 + shift_BC1)
    dx_BCHW, dw_C, db_C = torch.ops.aten.native_group_norm_backward(
        dz_BCHW, wide_x_BCHW, mean_BG, rstd_BG, w_C, B, C, H * W, groups, [True, True, True]
    )
    dx_BCHW = dx_BCHW.to(x_BCHW.dtype).contiguous(memory_format=_LAST)
    return dx_BCHW, dw_C.to(weight_C.dtype), db_C.to(bias_C.dtype)


def _shapes_back(
    dy_BCHW: Tensor, x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x_BCHW), torch.empty_like(weight_C), torch.empty_like(bias_C)


def _like(x_BCHW: Tensor) -> Tensor:
    return torch.empty_like(x_BCHW, memory_format=_LAST)


_forward = operator(
    "group_norm_silu(Tensor x, Tensor weight, Tensor bias, int groups, float epsilon, bool silu) "
    "-> (Tensor, Tensor, Tensor)",
    _compute,
    _shapes,
)
_backward = operator(
    "group_norm_silu_backward(Tensor dy, Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor rstd, int groups, "
    "bool silu) -> (Tensor, Tensor, Tensor)",
    _compute_back,
    _shapes_back,
)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, groups: int, epsilon: float, silu: bool
    ) -> Any:
        y_BCHW, mean_BG, rstd_BG = _forward(x_BCHW, weight_C, bias_C, groups, epsilon, silu)
        ctx.save_for_backward(x_BCHW, weight_C, bias_C, mean_BG, rstd_BG)
        ctx.numbers = groups, silu
        return y_BCHW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BCHW: Tensor) -> Any:
        return (*_backward(dy_BCHW, *ctx.saved_tensors, *ctx.numbers), None, None, None)
