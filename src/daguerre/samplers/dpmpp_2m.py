"""DPM-Solver++ 2M: second order for one call of the denoiser a step, from the x0 of the step before.

Holds the steps only; noise levels come from the objective's `Grid`, the denoiser from the caller.
Letters: B samples, C channels, H and W latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from daguerre.types import Grid


def sample(denoise: Callable[[Tensor, float], Tensor], x_BCHW: Tensor, grid: Grid) -> Tensor:
    """x0 [B, C, H, W] by Lu et al. 2022 (arXiv 2211.01095), algorithm 2, the midpoint form.

    `denoise(x, t)` gives x0; `x_BCHW` is noise at the level of the grid's first time, float32 or float64.
    With lambda = ln(a/s) and h its growth over a step, x' = (s'/s) x - a' (exp(-h) - 1) D; written with
    exp(-h) = (a s')/(a' s) it is finite at both ends, where h is infinite. D extrapolates x0 along lambda,
    and is x0 alone in the first step, in the last one, and after a step of infinite or no length.
    """
    x, t, a, s = x_BCHW, grid.t_N.tolist(), grid.a.tolist(), grid.s.tolist()
    h_before, x0_before = math.inf, x_BCHW
    for j in range(len(t)):
        x0 = denoise(x, t[j])
        h = _log_snr_half(a[j + 1], s[j + 1]) - _log_snr_half(a[j], s[j])
        slope = h / (2 * h_before) if 0 < h_before < math.inf and h < math.inf else 0.0
        D = x0 + slope * (x0 - x0_before)
        x = s[j + 1] / s[j] * x + (a[j + 1] - a[j] * s[j + 1] / s[j]) * D
        h_before, x0_before = h, x0
    return x


def _log_snr_half(a: float, s: float) -> float:
    """lambda = ln(a/s): minus infinity for pure noise, infinity for the clean end."""
    if a == 0 or s == 0:
        return -math.inf if a == 0 else math.inf
    return math.log(a / s)
