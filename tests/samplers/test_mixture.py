"""Every objective x sampler draws a 2-D mixture whose denoiser is known: shares, means, spreads, distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixture import THREE, even_normals, network
from quick_cases import crossed
from torch import Tensor

from daguerre import plugins
from daguerre.objectives.algebra import Diffusion
from daguerre.objectives.settings import DiffusionSettings
from daguerre.samplers import lcm
from daguerre.samplers.settings import keywords
from daguerre.types import Grid


def is_diffusion(name: str) -> bool:
    return issubclass(plugins.find("objectives", name).Settings, DiffusionSettings)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in plugins.names("objectives") if is_diffusion(name)),
    ("v", {"zero_terminal_snr": True}),
    ("x0", {"zero_terminal_snr": True, "shift": 2.0}),
    ("eps", {"name": "cosine"}),
    ("flow", {"shift": 3.0}),
]
CHURN = {"s_churn": 20.0, "s_tmin": 0.05, "s_tmax": 20.0, "s_noise": 1.0}
SAMPLERS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in plugins.names("samplers") if name != "lcm"),  # which takes no denoiser
    *((name, {"eta": 1.0}) for name in plugins.names("samplers") if "eta" in keywords(name)),
    *((name, CHURN) for name in plugins.names("samplers") if "s_churn" in keywords(name)),
]

NUM_SAMPLES = 1024
NUM_STEPS = 64
FIRST_ORDER = {"share": 0.01, "mean": 0.035, "covariance": 0.008, "distance": 0.035}
"""What 64 steps of Euler leave, and a new sampler's limits."""
SECOND_ORDER = {"share": 0.008, "mean": 0.008, "covariance": 0.005, "distance": 0.022}
FRESH_NOISE = {"share": 0.03, "mean": 0.045, "covariance": 0.015, "distance": 0.06}
"""Chance comes in: 1024 independent true samples have a deviation of .016 in a share, .013 in the mean of a
component, and in one direction in four a distance above .032."""
LIMITS = {"heun": SECOND_ORDER, "dpmpp_2m": SECOND_ORDER, "unipc": SECOND_ORDER}
LIMITS |= {"euler_ancestral": FRESH_NOISE, "dpmpp_2m_sde": FRESH_NOISE}


@pytest.mark.parametrize(("name", "schedule", "sampler", "own"), crossed(VARIANTS, SAMPLERS), ids=str)
def test_every_objective_and_sampler_draws_the_mixture(
    name: str, schedule: dict[str, Any], sampler: str, own: dict[str, float]
) -> None:
    objective = built(name, schedule)
    error = errors(run(objective, sampler, own))
    limit = FRESH_NOISE if own else LIMITS.get(sampler, FIRST_ORDER)
    assert all(error[what] <= limit[what] for what in limit), error


def test_the_limits_notice_a_network_that_is_off_by_a_tenth() -> None:
    module = plugins.find("objectives", "v")
    objective = module.build(module.Settings())
    net = network(objective, THREE.denoise)
    grid = levels(objective)
    x0 = plugins.find("samplers", "euler").sample(
        lambda x, t: 0.9 * objective.denoise(net, x, t, {}), even_normals(NUM_SAMPLES), grid
    )
    error = errors(x0)
    assert error["mean"] > FRESH_NOISE["mean"]
    assert error["distance"] > FRESH_NOISE["distance"]


@pytest.mark.parametrize(("name", "schedule", "num_steps"), crossed(VARIANTS, [4, 1]), ids=str)
def test_lcm_draws_the_mixture_of_a_consistency_function(name: str, schedule: dict[str, Any], num_steps: int) -> None:
    """Where the ODE leads from any level, found by 2M in 64 steps: what an LCM's network was distilled to answer."""
    objective = built(name, schedule)
    net, grid = network(objective, THREE.denoise), objective.grid(num_steps)

    def answer(x: Tensor, t: float) -> Tensor:
        times_N = levels(objective).t_N
        below = objective.grid_at(torch.cat([torch.tensor([t], dtype=torch.float64), times_N[times_N < t]]))
        return plugins.find("samplers", "dpmpp_2m").sample(lambda x, t: objective.denoise(net, x, t, {}), x, below)

    error = errors(lcm.sample(answer, grid.prior_std * even_normals(NUM_SAMPLES), grid, fresh_noise=normals()))
    limit = SECOND_ORDER if num_steps == 1 else FRESH_NOISE
    assert all(error[what] <= limit[what] for what in limit), error


def built(name: str, schedule: dict[str, Any]) -> Diffusion:
    module = plugins.find("objectives", name)
    return module.build(module.Settings(schedule=schedule))


def normals() -> Callable[[int], Tensor]:
    """Fresh noise of each step."""
    fresh = torch.Generator().manual_seed(1)
    return lambda step: torch.randn(NUM_SAMPLES, 2, 1, 1, generator=fresh)


def run(objective: Diffusion, sampler: str, own: dict[str, float]) -> Tensor:
    """Samples [B, 2, 1, 1] of a perfect network, through the objective's own `denoise`."""
    net, grid = network(objective, THREE.denoise), levels(objective)
    given: dict[str, Any] = {"fresh_noise": normals(), "level": objective.level}
    return plugins.find("samplers", sampler).sample(
        lambda x, t: objective.denoise(net, x, t, {}),
        grid.prior_std * even_normals(NUM_SAMPLES),
        grid,
        **{name: given[name] for name in keywords(sampler) if name in given},
        **own,
    )


def levels(objective: Diffusion) -> Grid:
    """The objective's own grid; on scaled_linear one that is denser at the clean end.

    There 64 even steps stop at t = 15, sigma .11, and the last step, to the mean of what is left, takes that much
    off every component's spread, in any sampler.
    """
    if objective.settings.schedule.name != "scaled_linear":
        return objective.grid(NUM_STEPS)
    return objective.grid_at((999 * torch.linspace(1, 0, NUM_STEPS, dtype=torch.float64) ** 2).round())


def errors(x0_B211: Tensor) -> dict[str, float]:
    """Largest error over components of share, mean and covariance, and the distance of the distributions."""
    component = THREE.component(x0_B211)
    worst = {"share": 0.0, "mean": 0.0, "covariance": 0.0, "distance": THREE.distance(x0_B211)}
    for k in range(len(THREE.weight_K)):
        mine_B2 = x0_B211[component == k].double().reshape(-1, 2)
        off = {
            "share": len(mine_B2) / len(x0_B211) - THREE.weight_K[k],
            "mean": mine_B2.mean(0) - THREE.mean_K2[k],
            "covariance": mine_B2.T.cov() - THREE.cov_K22[k],
        }
        worst |= {what: max(worst[what], float(value.abs().max())) for what, value in off.items()}
    return worst
