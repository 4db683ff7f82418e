"""Order of convergence, measured against the closed-form flow of one Gaussian: error falls as steps^-order."""

from __future__ import annotations

import math

import pytest
import torch
from mixture import even_normals
from torch import Tensor

from daguerre import plugins
from daguerre.types import Grid

ORDER = {"ddim": 1, "euler": 1, "heun": 2, "dpmpp_2m": 2}
MEAN, VARIANCE = 0.7, 0.3**2


def flow_grid(num_steps: int) -> Grid:
    """(1 - t, t) from pure noise, even in t."""
    t = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return Grid(t_N=t[:-1], a=1 - t, s=t, frame=torch.ones_like(t), prior_std=1.0)


def preserving_grid(num_steps: int) -> Grid:
    """(cos, sin) of an angle from pi/2, pure noise, to 0, even in the angle: zero terminal SNR."""
    t = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    a, s = (t * math.pi / 2).cos(), (t * math.pi / 2).sin()
    a[0], s[-1] = 0.0, 0.0
    return Grid(t_N=t[:-1], a=a, s=s, frame=torch.where(a > 0, a, 1.0), prior_std=1.0)


def exploding_grid(num_steps: int) -> Grid:
    """(1, sigma) from 20, even in sqrt(sigma)."""
    sigma = torch.linspace(20**0.5, 0, num_steps + 1, dtype=torch.float64) ** 2
    ones = torch.ones_like(sigma)
    return Grid(t_N=sigma[:-1], a=ones, s=sigma, frame=ones, prior_std=20.0)


def log_snr_grid(num_steps: int) -> Grid:
    """Variance preserving, even in lambda = ln(a/s) from -5 to 9, then clean: no pure noise."""
    lam = torch.linspace(-5, 9, num_steps, dtype=torch.float64)
    s = torch.cat([torch.sigmoid(-2 * lam).sqrt(), torch.zeros(1, dtype=torch.float64)])
    a = (1 - s**2).sqrt()
    return Grid(t_N=lam, a=a, s=s, frame=a, prior_std=1.0)


GRIDS = {"flow": flow_grid, "preserving": preserving_grid, "exploding": exploding_grid, "log_snr": log_snr_grid}
LOGARITHM = {("dpmpp_2m", "flow"), ("dpmpp_2m", "preserving")}
"""Steps even in t do not get short in lambda next to pure noise: 2M nears its order from below, as with a logarithm
(1.53, 1.66, 1.74, 1.78, 1.81 from doubling to doubling)."""


def error(sampler: str, grid: Grid) -> float:
    """Largest distance from where the probability-flow ODE of N(MEAN, VARIANCE) takes each start."""
    levels = {t: (a, s) for t, a, s in zip(grid.t_N.tolist(), grid.a.tolist(), grid.s.tolist(), strict=False)}

    def denoise(x: Tensor, t: float) -> Tensor:
        a, s = levels[t]
        return MEAN + a * VARIANCE / (a**2 * VARIANCE + s**2) * (x - a * MEAN)

    start = grid.prior_std * even_normals(64).double()
    a, s = levels[float(grid.t_N[0])]
    exact = MEAN + (VARIANCE / (a**2 * VARIANCE + s**2)) ** 0.5 * (start - a * MEAN)
    found = plugins.find("samplers", sampler).sample(denoise, start, grid)
    assert found.dtype == torch.float64
    return float((found - exact).abs().max())


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("sampler", plugins.names("samplers"))
def test_halving_the_step_divides_the_error_by_two_to_the_order(sampler: str, kind: str) -> None:
    coarse, fine = (error(sampler, GRIDS[kind](num_steps)) for num_steps in (512, 1024))
    order, slack = ORDER.get(sampler, 1), 0.3 if (sampler, kind) in LOGARITHM else 0.1
    assert abs(math.log2(coarse / fine) - order) < slack
