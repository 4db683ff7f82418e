"""Our samplers beside diffusers' schedulers: the same levels, the same network, every x on the way compared.

The network is a small random one, no denoiser: parity is of the formulas, whatever the network says.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import diffusers
import pytest
import torch
from schedulers import objective_of, run_ours, run_scheduler
from torch import Tensor

from daguerre.objectives.algebra import Diffusion
from daguerre.samplers import ddim

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:diffusers")
LINEAR = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "num_train_timesteps": 1000}
PREDICTION = {"eps": "epsilon", "x0": "sample", "v": "v_prediction"}
LATENTS = torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(0))
MIX_44, SHIFT_4 = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)) / 2, torch.linspace(-0.5, 0.5, 4)


def net(x_BCHW: Tensor, c_noise_B: Tensor, cond: Any) -> Tensor:
    mixed = torch.einsum("dc,bchw->bdhw", MIX_44, x_BCHW) + SHIFT_4.reshape(1, 4, 1, 1)
    return torch.tanh(mixed) * (1 + 0.3 * torch.sin(c_noise_B.float() / 150)).reshape(-1, 1, 1, 1)


def assert_same_way(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-5) -> None:
    """Each x equal to within `tolerance` of its largest element (at least 1)."""
    assert len(ours) == len(theirs)
    for j, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        assert float((x - y).abs().max()) <= tolerance * max(1.0, float(y.abs().max())), f"call {j}"


def compare(
    objective: Diffusion,
    sampler: str,
    scheduler: Any,
    num_steps: int = 20,
    spacing: str = "trailing",
    scale: float = 1.0,
) -> None:
    grid = objective.grid(num_steps, spacing)
    ours = run_ours(objective, sampler, net, LATENTS, grid)
    assert_same_way(ours, run_scheduler(scheduler, net, LATENTS * scale, num_steps))


@pytest.mark.parametrize("spacing", ["trailing", "leading"])
@pytest.mark.parametrize("name", PREDICTION)
def test_ddim_is_diffusers_ddim(name: str, spacing: str) -> None:
    scheduler = diffusers.DDIMScheduler(
        **LINEAR, prediction_type=PREDICTION[name], timestep_spacing=spacing, steps_offset=1, clip_sample=False
    )
    compare(objective_of(name), "ddim", scheduler, spacing=spacing)


@pytest.mark.parametrize("name", ["v", "x0"])
def test_ddim_is_diffusers_ddim_from_pure_noise(name: str) -> None:
    scheduler = diffusers.DDIMScheduler(
        **LINEAR,
        prediction_type=PREDICTION[name],
        timestep_spacing="trailing",
        rescale_betas_zero_snr=True,
        clip_sample=False,
    )
    compare(objective_of(name, zero_terminal_snr=True), "ddim", scheduler)


@pytest.mark.parametrize(("zero_terminal_snr", "eta"), [(False, 1.0), (False, 0.4), (True, 0.7)])
def test_ddim_adds_diffusers_share_of_fresh_noise(zero_terminal_snr: bool, eta: float) -> None:
    """From pure noise with eta = 1 nothing of eps is left; diffusers' float32 leaves sqrt(1e-7) of it or is NaN."""
    scheduler = diffusers.DDIMScheduler(
        **LINEAR,
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        rescale_betas_zero_snr=zero_terminal_snr,
        clip_sample=False,
    )
    fresh = [torch.randn(LATENTS.shape, generator=torch.Generator().manual_seed(j)) for j in range(10)]
    objective = objective_of("v", zero_terminal_snr=zero_terminal_snr)
    ours = run_ours(objective, "ddim", net, LATENTS, objective.grid(10), eta=eta, fresh_noise=fresh.__getitem__)

    scheduler.set_timesteps(10)
    x, theirs = LATENTS, [LATENTS]
    for j, t in enumerate(scheduler.timesteps):
        x = scheduler.step(net(x, t, {}), t, x, eta=eta, variance_noise=fresh[j], return_dict=False)[0]
        theirs.append(x)
    assert_same_way(ours, theirs)


@pytest.mark.parametrize(("spacing", "scale"), [("trailing", None), ("leading", 1.0), ("linspace", None)])
@pytest.mark.parametrize("name", PREDICTION)
def test_euler_is_diffusers_euler(name: str, spacing: str, scale: float | None) -> None:
    """From the same first x: trailing and linspace, diffusers starts at sigma_max, not sqrt(sigma_max^2 + 1)."""
    objective = objective_of(name)
    scheduler = diffusers.EulerDiscreteScheduler(
        **LINEAR, prediction_type=PREDICTION[name], timestep_spacing=spacing, steps_offset=1
    )
    scale = scale or 1 / float(objective.grid(20, spacing).s[0])
    compare(objective, "euler", scheduler, spacing=spacing, scale=scale)


@pytest.mark.parametrize("num_steps", [20, 30])
@pytest.mark.parametrize("name", PREDICTION)
def test_heun_is_diffusers_heun(name: str, num_steps: int) -> None:
    objective = objective_of(name)
    scheduler = diffusers.HeunDiscreteScheduler(**LINEAR, prediction_type=PREDICTION[name], timestep_spacing="trailing")
    compare(objective, "heun", scheduler, num_steps, scale=1 / float(objective.grid(num_steps).s[0]))


@pytest.mark.parametrize(("sampler", "order"), [("ddim", 1), ("euler", 1), ("dpmpp_2m", 2)])
@pytest.mark.parametrize("num_steps", [10, 30])
@pytest.mark.parametrize("name", PREDICTION)
def test_2m_is_diffusers_multistep_solver_and_its_first_order_is_ddim(
    name: str, num_steps: int, sampler: str, order: int
) -> None:
    scheduler = diffusers.DPMSolverMultistepScheduler(
        **LINEAR, prediction_type=PREDICTION[name], timestep_spacing="trailing", solver_order=order
    )
    compare(objective_of(name), sampler, scheduler, num_steps)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_euler_is_diffusers_flow_match_euler(shift: float) -> None:
    objective = objective_of("flow", shift=shift)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    ours = run_ours(objective, "euler", net, LATENTS, objective.grid(20))
    even = [1 - j / 20 for j in range(20)]
    assert_same_way(ours, run_scheduler(scheduler, net, LATENTS, 20, sigmas=even))


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_heun_is_diffusers_flow_match_heun(shift: float) -> None:
    """diffusers' own times, even from 1 to 1/1000: it takes no others."""
    objective = objective_of("flow", shift=shift)
    scheduler = diffusers.FlowMatchHeunDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(20)
    grid = objective.grid_at(torch.unique(scheduler.timesteps.double() / 1000).flip(0))
    assert_same_way(run_ours(objective, "heun", net, LATENTS, grid), run_scheduler(scheduler, net, LATENTS, 20))


@pytest.mark.parametrize(("sampler", "order"), [("euler", None), ("ddim", 1), ("dpmpp_2m", 2)])
def test_edm_samplers_are_diffusers_edm_schedulers(sampler: str, order: int | None) -> None:
    """From the same first x: diffusers starts at sqrt(sigma_max^2 + 1)."""
    scheduler: Any = diffusers.EDMEulerScheduler()
    if order is not None:
        scheduler = diffusers.EDMDPMSolverMultistepScheduler(solver_order=order)
    compare(objective_of("edm"), sampler, scheduler, scale=80 / (80**2 + 1) ** 0.5)


def test_diffusers_ddim_steps_to_another_time_where_the_steps_do_not_divide() -> None:
    """Why trailing DDIM of 30 steps is exported as the first-order multistep solver: it steps to 933 and is at 932."""
    scheduler = diffusers.DDIMScheduler(**LINEAR, prediction_type="v_prediction", timestep_spacing="trailing")
    scheduler.set_timesteps(30)
    times = scheduler.timesteps.tolist()
    assert any(here - 1000 // 30 != after for here, after in pairwise(times))
    assert times == objective_of("v").grid(30).t_N.tolist()


def test_ddim_without_fresh_noise_is_euler_to_the_bit() -> None:
    objective = objective_of("v", zero_terminal_snr=True)
    grid = objective.grid(7)
    with_eta = run_ours(objective, "ddim", net, LATENTS, grid, eta=0.0, fresh_noise=None)
    assert all(map(torch.equal, with_eta, run_ours(objective, "euler", net, LATENTS, grid)))
    assert ddim.sample.__kwdefaults__ == {"fresh_noise": None, "eta": 0.0}


@pytest.mark.parametrize("name", ["eps", "v"])
@pytest.mark.parametrize("shift", [0.5, 1.1])
def test_other_levels_of_the_networks_own_timesteps_are_eulers_with_their_sigmas(name: str, shift: float) -> None:
    """diffusers finds the timestep of a sigma along its logarithm, ours along sigma: up to .01 of a step apart."""
    objective = objective_of(name)
    moved = objective.on(objective.settings.schedule.shifted(shift))
    grid, told = moved.grid(20), []
    scheduler = diffusers.EulerDiscreteScheduler(
        **LINEAR, prediction_type=PREDICTION[name], timestep_spacing="trailing", steps_offset=1
    )

    def watched(x_BCHW: Tensor, c_noise_B: Tensor, cond: Any) -> Tensor:
        told.append(float(c_noise_B[0]))
        return net(x_BCHW, c_noise_B, cond)

    latents = LATENTS / float(grid.s[0])
    theirs = run_scheduler(scheduler, watched, latents, 20, sigmas=(grid.s / grid.a).tolist())
    assert_same_way(run_ours(moved, "euler", net, LATENTS, grid), theirs, 1e-4)
    torch.testing.assert_close(torch.tensor(told), moved.c_noise(grid.t_N).float(), rtol=0, atol=0.1)
