"""Euler's method: a straight line from each noise level to the next."""

from torch import Tensor

from daguerre.types import Denoise, Grid


def sample(denoise: Denoise, x_BCHW: Tensor, grid: Grid) -> Tensor:
    """x0 [B, C, H, W] by Euler steps of the probability-flow ODE (Karras et al. 2022, arXiv 2206.00364, eq. 4).

    Arguments as in ddim.py. The ODE is dx = x0 da + eps ds, and holding x0 and eps over a step gives a' x0 + s' eps
    in whatever frame x / c the line is drawn: for variance-exploding paths Karras' Euler, for flow x + (t' - t)(eps
    - x0), for variance-preserving ones DDIM with eta = 0.
    """
    x, t, a, s = x_BCHW, grid.t_N.tolist(), grid.a.tolist(), grid.s.tolist()
    for j in range(len(t)):
        x0 = denoise(x, t[j])
        eps = (x - a[j] * x0) / s[j]
        x = a[j + 1] * x0 + s[j + 1] * eps
    return x
