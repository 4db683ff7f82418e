"""Heun's method: Euler's step, then the mean of the slopes at both of its ends. Two calls of the denoiser a step.

With churn each step first adds fresh noise.
"""

import math
from collections.abc import Callable

from torch import Tensor

from daguerre.types import Denoise, FreshNoise, Grid


def sample(
    denoise: Denoise,
    x_BCHW: Tensor,
    grid: Grid,
    *,
    fresh_noise: FreshNoise | None = None,
    level: Callable[[float], tuple[float, float, float]] | None = None,
    s_churn: float = 0.0,
    s_tmin: float = 0.0,
    s_tmax: float | None = None,
    s_noise: float = 1.0,
) -> Tensor:
    """x0 [B, C, H, W] by Karras et al. 2022 (arXiv 2206.00364), algorithm 1, with 2N - 1 calls for N steps.

    Arguments as in ddim.py. In the frame x / c the ODE reads d(x/c) = x0 d(a/c) + eps d(s/c); the step averages x0
    and eps over its ends. The grid's `frame` makes this EDM's Heun for variance-preserving paths (c = a, but 1
    where a = 0) and flow's own (c = 1). The step to the clean end is Euler's.

    With `s_churn` it is algorithm 2: where sigma = s/a is in [s_tmin, s_tmax], fresh noise of deviation `s_noise`
    first takes x/a to sigma (1 + min(s_churn/N, sqrt 2 - 1)). `level(sigma)` gives (t, a, s) there, or at the noisiest
    level below that the path has; `fresh_noise(j)` as in ddim.py. Pure noise is as noisy as can be.
    """
    x, t, a, s, c = x_BCHW, grid.t_N.tolist(), grid.a.tolist(), grid.s.tolist(), grid.frame.tolist()
    gamma, upto = min(s_churn / len(t), math.sqrt(2) - 1), math.inf if s_tmax is None else s_tmax
    for j in range(len(t)):
        if gamma > 0 and a[j] > 0 and s_tmin <= s[j] / a[j] <= upto:
            assert fresh_noise is not None, "churn needs fresh noise"
            assert level is not None, "churn needs the levels between those of the grid"
            t[j], a_hat, s_hat = level((1 + gamma) * s[j] / a[j])
            # At a level that the path caps, sigma does not grow as asked for: no more is added than leads there.
            added = math.sqrt(max(0.0, (s_hat / a_hat) ** 2 - (s[j] / a[j]) ** 2))
            x = a_hat * (x / a[j] + added * s_noise * fresh_noise(j))
            # The frame moves with the level where it is the signal (variance-preserving paths).
            a[j], s[j], c[j] = a_hat, s_hat, a_hat if c[j] == a[j] else c[j]
        x0 = denoise(x, t[j])
        eps = (x - a[j] * x0) / s[j]
        ahead = a[j + 1] * x0 + s[j + 1] * eps
        # Euler at the clean end: there is no slope where the noise is 0.
        if s[j + 1] == 0:
            return ahead
        x0_ahead = denoise(ahead, t[j + 1])
        eps_ahead = (ahead - a[j + 1] * x0_ahead) / s[j + 1]
        da, ds = a[j + 1] / c[j + 1] - a[j] / c[j], s[j + 1] / c[j + 1] - s[j] / c[j]
        x = c[j + 1] * (x / c[j] + da / 2 * (x0 + x0_ahead) + ds / 2 * (eps + eps_ahead))
    return x
