"""UniPC: 2M's step as predictor, and a corrector that uses the next step's x0, for one call of the denoiser a step."""

import math

from torch import Tensor

from daguerre.samplers.dpmpp_2m import Extrapolation, log_snr_steps
from daguerre.types import Denoise, Grid


def sample(denoise: Denoise, x_BCHW: Tensor, grid: Grid) -> Tensor:
    """x0 [B, C, H, W] by UniPC-2 of x0 with B(h) = exp(h) - 1 (Zhao et al. 2023, arXiv 2302.04867, algorithm 5).

    Arguments as in ddim.py. Each step goes to x' = (s'/s) x + (a' - a s'/s) D, first with D of dpmpp_2m.py. Where
    the denoiser is then called, its answer makes a better D of the step just done, from which x' is made again; the
    answer itself is used as it is. The last step, which ends clean, has no corrector.
    """
    t, a, s, h = grid.t_N.tolist(), grid.a.tolist(), grid.s.tolist(), log_snr_steps(grid)
    extrapolated = Extrapolation(grid)

    def stepped(j: int, x: Tensor, D: Tensor) -> Tensor:
        return s[j + 1] / s[j] * x + (a[j + 1] - a[j] * s[j + 1] / s[j]) * D

    x, x0s = x_BCHW, [denoise(x_BCHW, t[0])]
    for j in range(len(t)):
        ahead = stepped(j, x, extrapolated(j, x0s[-1]))
        if s[j + 1] == 0:
            return ahead
        x0_ahead = denoise(ahead, t[j + 1])
        ratio = h[j - 1] / h[j] if j and h[j - 1] > 0 < h[j] else None
        x = stepped(j, x, _corrected([*x0s, x0_ahead], h[j], ratio))
        # The answer at the predicted x is kept and the corrected x is not called again: one call a step, as in the
        # paper.
        x0s = [x0s[-1], x0_ahead]
    return x


def _corrected(x0s: list[Tensor], h: float, ratio: float | None) -> Tensor:
    """D of a step of length h between the last two of `x0s`; `ratio` is the length of the step before, over h.

    Without a step before it is their mean, the trapezoid in a/s, which is finite from pure noise too. Otherwise the
    parabola through three x0, weighted as exp(lambda) weights it: the paper's R rho = b for two unknowns.
    """
    x0, x0_ahead = x0s[-2:]
    if ratio is None:
        return x0 + (x0_ahead - x0) / 2
    # expm1: over a short step both terms are large and nearly the same.
    b1 = -1 / math.expm1(-h) - 1 / h
    b2 = -1 / math.expm1(-h) - 2 * b1 / h
    rho = (b1 - b2) / (1 + ratio)
    return x0 + rho / ratio * (x0 - x0s[0]) + (b1 - rho) * (x0_ahead - x0)
