"""Global response normalisation (Woo et al. 2023, ConvNeXt V2, arXiv 2301.00808), which the blocks of Stable Cascade
have between their products.

y = gamma x r + beta + x, where r is the norm of a channel over the image, divided by the mean norm of all channels.
diffusers computes the norm by an operator that a CPU has in a slow form alone (2 ms in place of .1 for 32 images of
4 x 4 x 512), and the rest by four operators; here it is a sum of squares and one operator, and for the backward pass
nothing but the input is kept. A custom operator of torch: `torch.compile` and tensors without memory see shapes alone.

Shape letters: B images, H and W height and width, C channels.
"""

from typing import Any

import torch
from torch import Tensor

EPSILON = 1e-6


def response_norm(x_BHWC: Tensor, gamma_C: Tensor, beta_C: Tensor) -> Tensor:
    """[B, H, W, C] of the type of `x_BHWC`, computed in float32 at least. `gamma_C` and `beta_C` are [C] or
    [1, 1, 1, C], of any float type. RuntimeError for what is no image.

    Under autocast torch would return float32, which the next product rounds to its own type; here the one rounding is
    at the end.
    """
    if x_BHWC.ndim != 4:  # not torch._check, whose message torch.compile cannot trace: each call would break the graph
        raise RuntimeError(f"an image has 4 dims, B H W C; got {list(x_BHWC.shape)}")
    return _forward(x_BHWC, gamma_C, beta_C)


@torch.library.custom_op("daguerre::response_norm", mutates_args=())
def _forward(x_BHWC: Tensor, gamma_C: Tensor, beta_C: Tensor) -> Tensor:
    x = _wide(x_BHWC)
    _, _, ratio = _norms(x)
    return torch.addcmul(_wide(beta_C), x, 1 + _wide(gamma_C) * ratio).to(x_BHWC.dtype)


@_forward.register_fake
def _(x_BHWC: Tensor, gamma_C: Tensor, beta_C: Tensor) -> Tensor:
    return x_BHWC.new_empty(x_BHWC.shape)


@torch.library.custom_op("daguerre::response_norm_backward", mutates_args=())
def _backward(dy_BHWC: Tensor, x_BHWC: Tensor, gamma_C: Tensor, beta_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gamma and beta."""
    dy, x, gamma = _wide(dy_BHWC), _wide(x_BHWC), _wide(gamma_C)
    norm, mean, ratio = _norms(x)
    dscale = (dy * x).sum((1, 2), keepdim=True)  # of 1 + gamma ratio
    dratio = dscale * gamma
    dnorm = (dratio - (dratio * ratio).mean(-1, keepdim=True)) / mean
    slope = (dnorm / norm).masked_fill_(norm == 0, 0)  # as torch's: a channel of zeros stays where it is
    dx = torch.addcmul(dy * (1 + gamma * ratio), x, slope)
    dgamma, dbeta = (dscale * ratio).sum(0), dy.sum((0, 1, 2))
    return dx.to(x_BHWC.dtype), dgamma.to(gamma_C.dtype).view_as(gamma_C), dbeta.to(beta_C.dtype).view_as(beta_C)


@_backward.register_fake
def _(dy_BHWC: Tensor, x_BHWC: Tensor, gamma_C: Tensor, beta_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x_BHWC.new_empty(x_BHWC.shape), gamma_C.new_empty(gamma_C.shape), beta_C.new_empty(beta_C.shape)


def _norms(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each channel; their mean, with epsilon; and their ratio: [B, 1, 1, C], [B, 1, 1, 1], [B, 1, 1, C]."""
    norm = x.square().sum((1, 2), keepdim=True).sqrt_()
    mean = norm.mean(-1, keepdim=True) + EPSILON
    return norm, mean, norm / mean


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(dy, *ctx.saved_tensors)


_forward.register_autograd(_gradients, setup_context=_keep)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
