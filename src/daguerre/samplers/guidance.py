"""Classifier-free guidance: two predictions at one noise level become one.

Holds no sampler. Guidance acts on the network's prediction y, as published; since x0 is linear in y at a
given x_t, the scale would do the same to x0, but rescaling looks at the spread of y itself.
Letters: B samples, C channels, H and W latent height and width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from daguerre.types import Cond

Predict = Callable[[Tensor, float, Cond], Tensor]
"""(x [B, C, H, W], t, conditioning of B samples) to the network's prediction y [B, C, H, W]."""


def guide(
    predict: Predict, cond: Cond, null_cond: Cond | None, scale: float, rescale: float = 0.0
) -> Callable[[Tensor, float], Tensor]:
    """The guided prediction (x, t) -> y [B, C, H, W]: y_null + scale (y_cond - y_null).

    Ho and Salimans 2022 (arXiv 2207.12598, eq. 6, in the form where 1 is no guidance). Both sides run as one
    batch of 2B, the null side first; at scale 1 the null side does not run and `null_cond` may be None.
    `null_cond` is what the prediction is led away from: the null caption, or a negative prompt.
    `rescale` in [0, 1] brings the spread back by that share (see `rescaled`).
    """
    if scale == 1:
        return lambda x, t: predict(x, t, cond)
    assert null_cond is not None, "guidance needs the conditioning of the null side"
    both = {name: torch.cat([null_cond[name], cond[name]]) for name in cond}

    def guided(x_BCHW: Tensor, t: float) -> Tensor:
        y = predict(torch.cat([x_BCHW, x_BCHW]), t, both).to(x_BCHW.dtype)
        y_null, y_cond = y.chunk(2)
        return rescaled(y_null + scale * (y_cond - y_null), y_cond, rescale)

    return guided


def rescaled(y_BCHW: Tensor, y_cond_BCHW: Tensor, rescale: float) -> Tensor:
    """`y` with each sample's spread brought back to that of the conditional prediction, by the share `rescale`.

    Lin et al. 2023 (arXiv 2305.08891, eq. 15 and 16); the spread is over all dims but the first.
    """
    if rescale == 0:
        return y_BCHW
    dims = list(range(1, y_BCHW.ndim))
    ratio = y_cond_BCHW.std(dims, keepdim=True) / y_BCHW.std(dims, keepdim=True)
    return y_BCHW * (rescale * ratio + (1 - rescale))
