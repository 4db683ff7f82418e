"""Order of convergence, measured against the closed-form flow of one Gaussian: error falls as steps^-order.

Samplers with fresh noise reach the Gaussian in law: their error is that of its mean and deviation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from mixture import even_normals
from quick_cases import crossed
from torch import Tensor

from daguerre import plugins
from daguerre.types import Grid

ORDER = {"ddim": 1, "euler": 1, "heun": 2, "dpmpp_2m": 2, "unipc": 2}
IN_LAW = {"euler_ancestral": 1, "dpmpp_2m_sde": 2}
"""Samplers with fresh noise, and the order of what they draw."""
CONSISTENCY = {"lcm"}
"""Exact in any number of steps, of a network that is no denoiser."""
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
LOGARITHM = {(sampler, kind) for sampler in ("dpmpp_2m", "dpmpp_2m_sde") for kind in ("flow", "preserving")}
"""Steps even in t do not get short in lambda next to pure noise: 2M nears its order from below, as with a logarithm
(1.53, 1.66, 1.74, 1.78, 1.81 from doubling to doubling)."""
CORRECTED = {("unipc", "exploding"): 3, ("unipc", "log_snr"): 3}
"""UniPC's corrector adds an order where the steps get short in lambda."""


def of_gaussian(grid: Grid) -> Callable[[Tensor, float], Tensor]:
    """The denoiser of N(MEAN, VARIANCE) at the levels of a grid."""
    levels = {t: (a, s) for t, a, s in zip(grid.t_N.tolist(), grid.a.tolist(), grid.s.tolist(), strict=False)}

    def denoise(x: Tensor, t: float) -> Tensor:
        a, s = levels[t]
        return MEAN + a * VARIANCE / (a**2 * VARIANCE + s**2) * (x - a * MEAN)

    return denoise


def consistent(grid: Grid) -> Callable[[Tensor, float], Tensor]:
    """Where the probability-flow ODE of N(MEAN, VARIANCE) takes x from the levels of a grid: a perfect LCM."""
    levels = {t: (a, s) for t, a, s in zip(grid.t_N.tolist(), grid.a.tolist(), grid.s.tolist(), strict=False)}

    def answer(x: Tensor, t: float) -> Tensor:
        a, s = levels[t]
        return MEAN + (VARIANCE / (a**2 * VARIANCE + s**2)) ** 0.5 * (x - a * MEAN)

    return answer


def error(sampler: str, grid: Grid) -> float:
    """Largest distance from where the probability-flow ODE of N(MEAN, VARIANCE) takes each start."""
    start = grid.prior_std * even_normals(64).double()
    found = plugins.find("samplers", sampler).sample(of_gaussian(grid), start, grid)
    assert found.dtype == torch.float64
    return float((found - consistent(grid)(start, float(grid.t_N[0]))).abs().max())


def moments(sampler: str, grid: Grid, denoise: Callable[[Tensor, float], Tensor]) -> tuple[float, float]:
    """Mean and standard deviation of what a sampler draws with a denoiser that is linear in x, without chance.

    Then an image is linear in the noise of its start and of each step: row j has a unit of the noise of step j, the
    last but one a unit of the start's, the last none.
    """
    num_steps = len(grid.t_N)
    a, s = float(grid.a[0]), float(grid.s[0])
    start = torch.full((num_steps + 2, 1, 1, 1), a * MEAN, dtype=torch.float64)
    start[-2] += math.sqrt(a**2 * VARIANCE + s**2)

    def fresh_noise(step: int) -> Tensor:
        unit = torch.zeros_like(start)
        unit[step] = 1
        return unit

    drawn = plugins.find("samplers", sampler).sample(denoise, start, grid, fresh_noise=fresh_noise).flatten()
    return float(drawn[-1]), float((drawn[:-1] - drawn[-1]).square().sum().sqrt())


def halved(coarse: float, fine: float) -> float:
    return math.log2(coarse / fine)


@pytest.mark.parametrize(
    ("sampler", "kind"), crossed(sorted({*plugins.names("samplers")} - {*IN_LAW} - CONSISTENCY), [*GRIDS])
)
def test_halving_the_step_divides_the_error_by_two_to_the_order(sampler: str, kind: str) -> None:
    num_steps = 256 if sampler == "unipc" else 512  # of order 3 little is left to see at 1024
    coarse, fine = (error(sampler, GRIDS[kind](num)) for num in (num_steps, 2 * num_steps))
    order = CORRECTED.get((sampler, kind), ORDER.get(sampler, 1))
    assert abs(halved(coarse, fine) - order) < (0.3 if (sampler, kind) in LOGARITHM else 0.1)


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("sampler", IN_LAW)
def test_halving_the_step_divides_the_error_in_law_by_two_to_the_order(sampler: str, kind: str) -> None:
    def error_in_law(num_steps: int) -> float:
        grid = GRIDS[kind](num_steps)
        mean, std = moments(sampler, grid, of_gaussian(grid))
        return max(abs(mean - MEAN), abs(std - VARIANCE**0.5))

    coarse, fine = error_in_law(512), error_in_law(1024)
    assert abs(halved(coarse, fine) - IN_LAW[sampler]) < (0.3 if (sampler, kind) in LOGARITHM else 0.1)


@pytest.mark.parametrize("num_steps", [1, 2, 8])
@pytest.mark.parametrize("kind", GRIDS)
def test_lcm_draws_the_law_exactly_with_a_consistency_function(kind: str, num_steps: int) -> None:
    grid = GRIDS[kind](num_steps)
    torch.testing.assert_close(moments("lcm", grid, consistent(grid)), (MEAN, VARIANCE**0.5), rtol=0, atol=1e-12)
