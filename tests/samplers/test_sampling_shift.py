"""A shift of the levels that are visited, apart from that of training: for every schedule and sampler."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from mixture import THREE, network
from quick_cases import chosen, crossed
from schedulers import STOCHASTIC, objective_of, run_ours, run_scheduler
from torch import Tensor

from daguerre import plugins
from daguerre.models.schedulers.betas import BetaSchedulers
from daguerre.objectives.algebra import Diffusion
from daguerre.samplers.draw import draw
from daguerre.samplers.settings import SamplingSettings

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:diffusers")
KINDS: list[tuple[str, str, float]] = [
    ("v", "scaled_linear", 0.5),
    ("eps", "cosine", 2.0),
    ("flow", "linear_flow", 3.0),
]
STEADY = [name for name in plugins.names("samplers") if name not in (*STOCHASTIC, "lcm")]
SEEDS = range(1024)
choose = BetaSchedulers().scheduler_of


def drawn(objective: Diffusion, net: Any, **settings: Any) -> Tensor:
    sampling = SamplingSettings(guidance_scale=1, **settings)
    return draw(objective, net, {}, None, (2, 1, 1), list(SEEDS), sampling)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind", "shift", "sampler"),
    [
        *crossed(KINDS, STEADY),
        *(pytest.param(*kind, sampler, marks=pytest.mark.long) for kind in KINDS for sampler in STOCHASTIC),
    ],
)
def test_every_sampler_draws_the_mixture_on_shifted_levels(name: str, kind: str, shift: float, sampler: str) -> None:
    """With the network of the training schedule, which knows its levels by what it is told alone."""
    objective, steps = objective_of(name, name=kind), 112 if sampler == "euler_ancestral" else 64
    x0 = drawn(objective, network(objective, THREE.denoise), sampler=sampler, num_inference_steps=steps, shift=shift)
    assert THREE.distance(x0) < 0.06


@pytest.mark.parametrize(("name", "kind", "shift"), KINDS)
def test_the_levels_are_those_of_a_schedule_with_that_shift(name: str, kind: str, shift: float) -> None:
    objective, other = objective_of(name, name=kind), objective_of(name, name=kind, shift=shift)
    grid, wanted = objective.at((4, 8, 8), SamplingSettings(shift=shift)).grid(10), other.grid(10)
    assert torch.equal(grid.s, wanted.s)
    assert torch.equal(grid.a, wanted.a)
    seen: list[float] = []
    net = network(objective, THREE.denoise)
    drawn(
        objective, lambda x, c, cond: seen.append(float(c[0])) or net(x, c, cond), num_inference_steps=10, shift=shift
    )
    told = objective.noise_conditioning(wanted.a[:-1], wanted.s[:-1])
    np.testing.assert_allclose(seen, told.numpy(), rtol=1e-6)


@pytest.mark.parametrize(("name", "kind", "shift"), chosen(KINDS, lambda name, kind, shift: name == "flow"))
def test_the_shift_of_training_and_none_are_the_same_to_the_bit(name: str, kind: str, shift: float) -> None:
    objective = objective_of(name, name=kind, shift=shift)
    net = network(objective, THREE.denoise)
    plain, given = (drawn(objective, net, num_inference_steps=5, **own) for own in ({}, {"shift": shift}))
    assert torch.equal(plain, given)
    assert not torch.equal(plain, drawn(objective, net, num_inference_steps=5, shift=1.0))


def test_it_takes_the_place_of_a_shift_that_follows_the_size() -> None:
    objective = objective_of("flow", resolution_shift={"name": "linear_mu"})
    assert objective.at((1, 512, 512)).schedule.settings.shift != 2.0
    assert objective.at((1, 512, 512), SamplingSettings(shift=2.0)).schedule.settings.shift == 2.0


def test_flow_is_diffusers_with_that_shift() -> None:
    objective, latents = objective_of("flow"), torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))

    def net(x_BCHW: Tensor, c_noise_B: Tensor, cond: Any) -> Tensor:
        return torch.tanh(x_BCHW) * (1 + 0.3 * torch.sin(c_noise_B.float() / 150)).reshape(-1, 1, 1, 1)

    grid = objective.at((4, 5, 5), SamplingSettings(shift=3.0)).grid(12)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    theirs = run_scheduler(scheduler, net, latents, 12, sigmas=np.linspace(1, 1 / 12, 12))
    for x, y in zip(run_ours(objective, "euler", net, latents, grid), theirs, strict=True):
        assert (x - y).abs().max() < 1e-5


def test_a_schedule_without_a_shift_refuses_one() -> None:
    objective = objective_of("edm")
    with pytest.raises(ValueError, match=r"sampling.shift is 2.*edm has no shift: remove it; sigma_max"):
        drawn(objective, network(objective, THREE.denoise), shift=2.0)


def test_exports_follow_it_where_diffusers_can_and_say_where_not() -> None:
    shifted = SamplingSettings(shift=2.0)
    flow = choose(objective_of("flow", shift=3.0), shifted)
    assert flow.config["flow_shift"] == 2.0
    for name, kind in (("v", "scaled_linear"), ("v", "cosine")):
        objective = objective_of(name, name=kind)
        plan, plain = choose(objective, shifted), choose(objective, SamplingSettings())
        assert plan.config == plain.config
        assert any("this run samples with shift 2, so images differ" in notice for notice in plan.notices)
        assert choose(objective, SamplingSettings(shift=1.0)).notices == plain.notices
