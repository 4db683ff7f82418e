"""Heun's method: Euler's step, then the mean of the slopes at both of its ends. Two calls of the denoiser a step.

Holds the steps only; noise levels come from the objective's `Grid`, the denoiser from the caller.
Letters: B samples, C channels, H and W latent height and width.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from daguerre.types import Grid


def sample(denoise: Callable[[Tensor, float], Tensor], x_BCHW: Tensor, grid: Grid) -> Tensor:
    """x0 [B, C, H, W] by Karras et al. 2022 (arXiv 2206.00364), algorithm 1, with 2N - 1 calls for N steps.

    `denoise(x, t)` gives x0; `x_BCHW` is noise at the level of the grid's first time, float32 or float64.
    In the frame x / c the ODE reads d(x/c) = x0 d(a/c) + eps d(s/c); the step averages x0 and eps over its
    ends. The grid's `frame` makes this EDM's Heun for variance-preserving paths (c = a, but 1 where a = 0) and
    flow's own (c = 1). The step to the clean end is Euler's.
    """
    x, t, a, s, c = x_BCHW, grid.t_N.tolist(), grid.a.tolist(), grid.s.tolist(), grid.frame.tolist()
    for j in range(len(t)):
        x0 = denoise(x, t[j])
        eps = (x - a[j] * x0) / s[j]
        ahead = a[j + 1] * x0 + s[j + 1] * eps
        if s[j + 1] == 0:
            return ahead
        x0_ahead = denoise(ahead, t[j + 1])
        eps_ahead = (ahead - a[j + 1] * x0_ahead) / s[j + 1]
        da, ds = a[j + 1] / c[j + 1] - a[j] / c[j], s[j + 1] / c[j + 1] - s[j] / c[j]
        x = c[j + 1] * (x / c[j] + da / 2 * (x0 + x0_ahead) + ds / 2 * (eps + eps_ahead))
    return x
