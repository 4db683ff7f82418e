"""LayerNorm (Ba et al. 2016, arXiv 1607.06450) and RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) of rows in their
own type, with or without weight and bias.

Autocast of a GPU widens the rows to float32 and narrows the result again for each product behind it; torch's LayerNorm
in 16 bits reads its rows at a fifth of the speed of the memory where they are as narrow as those of a UNet, and
backward it reads them twice; RMSNorm of diffusers and, of rows and weights of different types, of torch is seven
operators, half of which write float32. Here each number is read once and written once; the arithmetic is float32. The
plain form is what computes on a CPU.

Shape letters: N rows, D features.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from daguerre.kernels import available
from daguerre.kernels.operators import operator, wide_type


def layer_norm(x: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, epsilon: float = 1e-5) -> Tensor:
    """[..., D] of the type of `x`, computed in float32 at least. Weight and bias may be of another float type."""
    result: Tensor = _LayerNorm.apply(x, weight_D, bias_D, epsilon)
    return result


def rms_norm(x: Tensor, weight_D: Tensor | None, epsilon: float, dtype: torch.dtype | None = None) -> Tensor:
    """[..., D] of `dtype`, else of the type of `x`, computed in float32 at least. The weight may be of another type."""
    result: Tensor = _RMSNorm.apply(x, weight_D, epsilon, x.dtype if dtype is None else dtype)
    return result


def _compute(
    x: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and mean and 1 / deviation [N] of the rows."""
    if available.triton(x.device):
        return available.module("row_norms").forward(x.contiguous(), weight_D, bias_D, epsilon)
    wide = wide_type(x)
    weight, bias = (None if p is None else p.to(wide) for p in (weight_D, bias_D))
    y, mean, rstd = torch.native_layer_norm(x.to(wide).contiguous(), x.shape[-1:], weight, bias, epsilon)
    return y.to(x.dtype), mean.flatten(), rstd.flatten()


def _shapes(x: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    of_row = x.new_empty(x.shape[:-1].numel(), dtype=wide_type(x))
    return x.new_empty(x.shape), of_row, torch.empty_like(of_row)


def _compute_back(
    dy: Tensor, x: Tensor, weight_D: Tensor | None, mean_N: Tensor, rstd_N: Tensor, of_weight: bool, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, in the type of the arithmetic; empty ones for what is not asked for."""
    if available.triton(x.device):
        dx, *rest = available.module("row_norms").backward(
            dy.contiguous(), x.contiguous(), weight_D, mean_N, rstd_N, of_weight, of_bias
        )
    else:
        wide, rows = wide_type(x), (*x.shape[:-1], 1)
        weight = None if weight_D is None else weight_D.to(wide)
        # Only whether there is a bias counts backward, not its numbers.
        bias = mean_N.new_empty(x.shape[-1]) if of_bias else None
        dx, *rest = torch.ops.aten.native_layer_norm_backward(
            dy.to(wide).contiguous(), x.to(wide).contiguous(), x.shape[-1:],
            mean_N.view(rows), rstd_N.view(rows), weight, bias, [True, of_weight, of_bias],
        )  # fmt: skip
    dweight, dbias = (mean_N.new_empty(0) if t is None else t for t in rest)
    return dx.to(x.dtype), dweight, dbias


def _shapes_back(
    dy: Tensor, x: Tensor, weight_D: Tensor | None, mean_N: Tensor, rstd_N: Tensor, of_weight: bool, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dweight, dbias = (mean_N.new_empty(x.shape[-1] if asked else 0) for asked in (of_weight, of_bias))
    return x.new_empty(x.shape), dweight, dbias


def _compute_rms(x: Tensor, weight_D: Tensor | None, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The result, and 1 / root mean square [N] of the rows."""
    if available.triton(x.device):
        found = available.module("row_norms").forward(x.contiguous(), weight_D, None, epsilon, dtype, False)
        return found[0], found[2]
    v = x.to(wide_type(x))
    scale = torch.rsqrt(v.square().mean(-1, keepdim=True) + epsilon)
    y = v * scale if weight_D is None else v * scale * weight_D
    return y.to(dtype), scale.flatten()


def _shapes_rms(x: Tensor, weight_D: Tensor | None, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1].numel(), dtype=wide_type(x))


def _compute_rms_back(
    dy: Tensor, x: Tensor, weight_D: Tensor | None, scale_N: Tensor, of_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of the weight in the type of the arithmetic; an empty one if it is not asked for."""
    if available.triton(x.device):
        dx, dweight, _ = available.module("row_norms").backward(
            dy.contiguous(), x.contiguous(), weight_D, None, scale_N, of_weight, False
        )
        return dx, scale_N.new_empty(0) if dweight is None else dweight
    wide, scale = wide_type(x), scale_N.view(*x.shape[:-1], 1)
    z, given = x.to(wide) * scale, dy.to(wide)
    dweight = (given * z).flatten(0, -2).sum(0) if of_weight else scale_N.new_empty(0)
    given = given if weight_D is None else given * weight_D
    return (scale * (given - z * (given * z).mean(-1, keepdim=True))).to(x.dtype), dweight


def _shapes_rms_back(
    dy: Tensor, x: Tensor, weight_D: Tensor | None, scale_N: Tensor, of_weight: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), scale_N.new_empty(x.shape[-1] if of_weight else 0)


_forward = operator(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float epsilon) -> (Tensor, Tensor, Tensor)", _compute, _shapes
)
_backward = operator(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool of_weight, bool of_bias) "
    "-> (Tensor, Tensor, Tensor)",
    _compute_back,
    _shapes_back,
)
_forward_rms = operator(
    "rms_norm(Tensor x, Tensor? weight, float epsilon, ScalarType dtype) -> (Tensor, Tensor)", _compute_rms, _shapes_rms
)
_backward_rms = operator(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor scale, bool of_weight) -> (Tensor, Tensor)",
    _compute_rms_back,
    _shapes_rms_back,
)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Any:
        y, mean, rstd = _forward(x, weight, bias, epsilon)
        ctx.bias_type = None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        _, of_weight, of_bias, _ = ctx.needs_input_grad
        x, weight, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = _backward(dy, x, weight, mean, rstd, of_weight, of_bias)
        return dx, dweight.to(weight.dtype) if of_weight else None, dbias.to(ctx.bias_type) if of_bias else None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, epsilon: float, dtype: torch.dtype) -> Any:
        y, scale = _forward_rms(x, weight, epsilon, dtype)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        of_weight = ctx.needs_input_grad[1]
        x, weight, scale = ctx.saved_tensors
        dx, dweight = _backward_rms(dy, x, weight, scale, of_weight)
        return dx, dweight.to(weight.dtype) if of_weight else None, None, None
