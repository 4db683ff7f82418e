"""Global response normalisation (Woo et al. 2023, ConvNeXt V2, arXiv 2301.00808), which the blocks of Stable Cascade
have between their products, with the GELU before it or without.

y = gamma x r + beta + x, where r is the norm of a channel over the image, divided by the mean norm of all channels.
diffusers computes the norm by an operator that a CPU has in a slow form alone (2 ms in place of .1 for 32 images of
4 x 4 x 512), and the rest by four operators, which autocast widens to float32; on a GPU they were a third of an update.
Here each pass reads the image twice and writes it once, in its own type; for the backward pass the input and the norms
of its channels are kept. The plain form is what computes on a CPU.

Shape letters: B images, H and W height and width, C channels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from daguerre.kernels import available
from daguerre.kernels.operators import operator, wide_type

EPSILON = 1e-6


def response_norm(x_BHWC: Tensor, gamma_C: Tensor, beta_C: Tensor, gelu: bool = False) -> Tensor:
    """[B, H, W, C] of the type of `x_BHWC`, computed in float32 at least. `gamma_C` and `beta_C` are [C] or
    [1, 1, 1, C], of any float type; with `gelu` the norm is of GELU of x. RuntimeError for what is no image.

    Under autocast torch would return float32, which the next product rounds to its own type; here the one rounding is
    at the end.
    """
    if x_BHWC.ndim != 4:  # not torch._check, whose message torch.compile cannot trace: each call would break the graph
        raise RuntimeError(f"an image has 4 dims, B H W C; got {list(x_BHWC.shape)}")
    result: Tensor = _ResponseNorm.apply(x_BHWC, gamma_C, beta_C, gelu)
    return result


def _compute(x_BHWC: Tensor, gamma_C: Tensor, beta_C: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """The result, and the norm of each channel, [B, 1, 1, C]."""
    gamma, beta = _wide(gamma_C), _wide(beta_C)
    if available.triton(x_BHWC.device):
        x_BHWC, kernels = x_BHWC.contiguous(), available.module("response_norm")
        norm = kernels.squares(x_BHWC, gelu).sqrt_()
        return kernels.scaled(x_BHWC, 1 + gamma * _ratio(norm)[1], beta, gelu), norm
    x = F.gelu(_wide(x_BHWC)) if gelu else _wide(x_BHWC)
    norm = x.square().sum((1, 2), keepdim=True).sqrt_()
    return torch.addcmul(beta, x, 1 + gamma * _ratio(norm)[1]).to(x_BHWC.dtype), norm


def _shapes(x_BHWC: Tensor, gamma_C: Tensor, beta_C: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    B, *_, C = x_BHWC.shape
    return x_BHWC.new_empty(x_BHWC.shape), x_BHWC.new_empty((B, 1, 1, C), dtype=wide_type(x_BHWC))


def _compute_back(
    dy_BHWC: Tensor, x_BHWC: Tensor, gamma_C: Tensor, beta_C: Tensor, norm_B11C: Tensor, gelu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gamma and beta."""
    gamma, (mean, ratio) = _wide(gamma_C), _ratio(norm_B11C)
    scale = 1 + gamma * ratio
    if triton := available.triton(x_BHWC.device):
        dy, x, kernels = dy_BHWC.contiguous(), x_BHWC.contiguous(), available.module("response_norm")
        dscale, dbeta_B11C = kernels.sums(dy, x, gelu)
        dbeta = dbeta_B11C.sum(0)
    else:
        dy, u = _wide(dy_BHWC), _wide(x_BHWC)
        x = F.gelu(u) if gelu else u
        dscale, dbeta = (dy * x).sum((1, 2), keepdim=True), dy.sum((0, 1, 2))
    dratio = dscale * gamma
    dnorm = (dratio - (dratio * ratio).mean(-1, keepdim=True)) / mean
    slope = (dnorm / norm_B11C).masked_fill_(norm_B11C == 0, 0)  # as torch's: a channel of zeros stays where it is
    if triton:
        dx = kernels.gradient(dy, x, scale, slope, gelu)
    else:
        dx = torch.addcmul(dy * scale, x, slope)
        dx = (torch.ops.aten.gelu_backward(dx, u) if gelu else dx).to(x_BHWC.dtype)
    dgamma = (dscale * ratio).sum(0)
    return dx, dgamma.to(gamma_C.dtype).view_as(gamma_C), dbeta.to(beta_C.dtype).view_as(beta_C)


def _shapes_back(
    dy_BHWC: Tensor, x_BHWC: Tensor, gamma_C: Tensor, beta_C: Tensor, norm_B11C: Tensor, gelu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x_BHWC.new_empty(x_BHWC.shape), gamma_C.new_empty(gamma_C.shape), beta_C.new_empty(beta_C.shape)


def _ratio(norm_B11C: Tensor) -> tuple[Tensor, Tensor]:
    """The mean norm of an image's channels, with epsilon, [B, 1, 1, 1]; and each over it, [B, 1, 1, C]."""
    mean = norm_B11C.mean(-1, keepdim=True) + EPSILON
    return mean, norm_B11C / mean


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_type(x))


_forward = operator(
    "response_norm(Tensor x, Tensor gamma, Tensor beta, bool gelu) -> (Tensor, Tensor)", _compute, _shapes
)
_backward = operator(
    "response_norm_backward(Tensor dy, Tensor x, Tensor gamma, Tensor beta, Tensor norm, bool gelu) "
    "-> (Tensor, Tensor, Tensor)",
    _compute_back,
    _shapes_back,
)


class _ResponseNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BHWC: Tensor, gamma_C: Tensor, beta_C: Tensor, gelu: bool) -> Any:
        y_BHWC, norm_B11C = _forward(x_BHWC, gamma_C, beta_C, gelu)
        ctx.save_for_backward(x_BHWC, gamma_C, beta_C, norm_B11C)
        ctx.gelu = gelu
        return y_BHWC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BHWC: Tensor) -> Any:
        return (*_backward(dy_BHWC, *ctx.saved_tensors, ctx.gelu), None)
