"""DDIM: from noise to image along a predicted x0, with a chosen share of fresh noise.

Holds the steps only; noise levels come from the objective's `Grid`, the denoiser from the caller.
Letters: B samples, C channels, H and W latent height and width.
"""

import math

from torch import Tensor

from daguerre.types import Denoise, FreshNoise, Grid


def sample(
    denoise: Denoise, x_BCHW: Tensor, grid: Grid, *, fresh_noise: FreshNoise | None = None, eta: float = 0.0
) -> Tensor:
    """x0 [B, C, H, W] by Song et al. 2020 (arXiv 2010.02502), eq. 12, for any path x = a x0 + s eps.

    `denoise(x, t)` gives x0; `x_BCHW` is noise at the level of the grid's first time, float32 or float64;
    `eta` in [0, 1] is 0 for the deterministic sampler, 1 for ancestral sampling; `fresh_noise(j)` gives the
    standard normal noise [B, C, H, W] that step j adds and is called only where that noise has an effect.
    """
    # Python numbers: x keeps its type, float32 or float64, and no coefficient waits for a device.
    x, t, a, s = x_BCHW, grid.t_N.tolist(), grid.a.tolist(), grid.s.tolist()
    for j in range(len(t)):
        x0 = denoise(x, t[j])
        eps = (x - a[j] * x0) / s[j]
        # Eq. 16 with exp(-h) = (a s')/(a' s): on variance-preserving paths both forms are the same number.
        sigma = eta * s[j + 1] * math.sqrt(1 - (a[j] * s[j + 1] / (a[j + 1] * s[j])) ** 2)
        x = a[j + 1] * x0 + math.sqrt(s[j + 1] ** 2 - sigma**2) * eps
        if sigma > 0:
            assert fresh_noise is not None, "eta > 0 needs fresh noise"
            x = x + sigma * fresh_noise(j)
    return x
