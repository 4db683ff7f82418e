"""DPM-Solver++ 2M: second order for one call of the denoiser a step, from the x0 of the step before."""

import math
from itertools import pairwise

from torch import Tensor

from daguerre.types import Denoise, Grid


def sample(denoise: Denoise, x_BCHW: Tensor, grid: Grid) -> Tensor:
    """x0 [B, C, H, W] by Lu et al. 2022 (arXiv 2211.01095), algorithm 2, the midpoint form.

    Arguments as in ddim.py. With lambda = ln(a/s) and h its growth over a step, x' = (s'/s) x - a' (exp(-h) - 1) D;
    written with exp(-h) = (a s')/(a' s) it is finite at both ends, where h is infinite. D extrapolates x0 along
    lambda, and is x0 alone in the first step, in the last one, and after a step of infinite or no length.
    """
    x, t, a, s = x_BCHW, grid.t_N.tolist(), grid.a.tolist(), grid.s.tolist()
    extrapolated = Extrapolation(grid)
    for j in range(len(t)):
        D = extrapolated(j, denoise(x, t[j]))
        x = s[j + 1] / s[j] * x + (a[j + 1] - a[j] * s[j + 1] / s[j]) * D
    return x


class Extrapolation:
    """D of each step of a grid: x0 extrapolated to the middle of the step, along lambda, from the step before."""

    def __init__(self, grid: Grid) -> None:
        self.h_N = log_snr_steps(grid)
        self.x0_before: Tensor | None = None

    def __call__(self, step: int, x0: Tensor) -> Tensor:
        """D [B, C, H, W] of a step from its x0; steps are asked for in their order."""
        before, self.x0_before = self.x0_before, x0
        h, h_before = self.h_N[step], self.h_N[step - 1] if step else math.inf
        # First order at both ends: there lambda is infinite, and so is every slope along it.
        if before is None or not 0 < h_before < math.inf or h == math.inf:
            return x0
        return x0 + h / (2 * h_before) * (x0 - before)


def log_snr_steps(grid: Grid) -> list[float]:
    """h, the growth of lambda = ln(a/s), over each step; infinite from pure noise and to the clean end."""
    levels = [
        math.log(a / s) if a > 0 < s else math.copysign(math.inf, a - s)
        for a, s in zip(grid.a.tolist(), grid.s.tolist(), strict=True)
    ]
    return [after - before for before, after in pairwise(levels)]
