"""DPM-Solver++ 2M of the SDE: the extrapolated x0 of 2M, with fresh noise in every step but the last."""

import math

from torch import Tensor

from daguerre.samplers.dpmpp_2m import Extrapolation
from daguerre.types import Denoise, FreshNoise, Grid


def sample(denoise: Denoise, x_BCHW: Tensor, grid: Grid, *, fresh_noise: FreshNoise | None = None) -> Tensor:
    """x0 [B, C, H, W] by Lu et al. 2022 (arXiv 2211.01095), SDE-DPM-Solver++(2M), the midpoint form.

    Arguments as in ddim.py. With q = exp(-h) = (a s')/(a' s), x' = (s'/s) q x + a' (1 - q^2) D + s' sqrt(1 - q^2)
    z, which is finite at both ends; D is that of dpmpp_2m.py.
    """
    x, t, a, s = x_BCHW, grid.t_N.tolist(), grid.a.tolist(), grid.s.tolist()
    extrapolated = Extrapolation(grid)
    for j in range(len(t)):
        D = extrapolated(j, denoise(x, t[j]))
        q = a[j] * s[j + 1] / (a[j + 1] * s[j])
        x = s[j + 1] / s[j] * q * x + a[j + 1] * (1 - q**2) * D
        if s[j + 1] > 0:  # at the clean end the noise would count 0 times, and is not drawn
            assert fresh_noise is not None, "the SDE needs fresh noise"
            x = x + s[j + 1] * math.sqrt(1 - q**2) * fresh_noise(j)
    return x
