"""The table of docs/samplers.md: which diffusers scheduler ends at our clean sample from the same unscaled noise.

Each row is one scheduler as an export would configure it; the limits are the table's figures.
"""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from mixture import network
from schedulers import betas_of, objective_of, run_ours, run_scheduler
from torch import Tensor

from daguerre.objectives.algebra import Diffusion

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:diffusers")
LINEAR = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "num_train_timesteps": 1000}
PREDICTION = {"eps": "epsilon", "x0": "sample", "v": "v_prediction", "flow": "flow_prediction"}
LATENTS = torch.randn(16, 4, 16, 16, generator=torch.Generator().manual_seed(0))
ORDER = {"ddim": 1, "euler": 1, "dpmpp_2m": 2}
FIRST_AND_SECOND = pytest.mark.parametrize("sampler", ORDER)
STEPS = pytest.mark.parametrize("num_steps", [20, pytest.param(30, marks=pytest.mark.long)])


def two_modes(x_BCHW: Tensor, a: Tensor, s: Tensor) -> Tensor:
    """E[x0 | x] where each element of x0 is one of two Gaussians at +-0.8 with a standard deviation of 0.3."""
    variance = a**2 * 0.3**2 + s**2
    upper = torch.sigmoid(2 * a * 0.8 * x_BCHW / variance)
    regressed = [mean + a * 0.3**2 / variance * (x_BCHW - a * mean) for mean in (0.8, -0.8)]
    return upper * regressed[0] + (1 - upper) * regressed[1]


def difference(
    objective: Diffusion, sampler: str, scheduler: Any, num_steps: int, *, scale: float = 1.0, spacing: str = "trailing"
) -> float:
    """Largest difference of x0; `scale` multiplies the latents that diffusers gets."""
    net = network(objective, two_modes)
    ours = run_ours(objective, sampler, net, LATENTS, objective.grid(num_steps, spacing))[-1]
    return float((ours - run_scheduler(scheduler, net, LATENTS * scale, num_steps)[-1]).abs().max())


def multistep(name: str, sampler: str, **config: Any) -> Any:
    config = {"prediction_type": PREDICTION[name], "timestep_spacing": "trailing", "steps_offset": 1} | config
    return diffusers.DPMSolverMultistepScheduler(solver_order=ORDER[sampler], **config)


@STEPS
@FIRST_AND_SECOND
@pytest.mark.parametrize("name", ["eps", "x0", "v"])
def test_scaled_linear_is_the_multistep_solver(name: str, sampler: str, num_steps: int) -> None:
    assert difference(objective_of(name), sampler, multistep(name, sampler, **LINEAR), num_steps) < 3e-6


@STEPS
@FIRST_AND_SECOND
@pytest.mark.parametrize("zero_terminal_snr", [False, True])
def test_a_shifted_schedule_goes_through_trained_betas(zero_terminal_snr: bool, sampler: str, num_steps: int) -> None:
    objective = objective_of("v", shift=2.0, zero_terminal_snr=zero_terminal_snr)
    betas = betas_of(objective, torch.arange(1000, dtype=torch.float64))
    scheduler = multistep("v", sampler, trained_betas=betas, rescale_betas_zero_snr=zero_terminal_snr)
    assert difference(objective, sampler, scheduler, num_steps) < (6e-5 if zero_terminal_snr else 3e-6)


@STEPS
@FIRST_AND_SECOND
@pytest.mark.parametrize("name", ["x0", "v"])
def test_zero_terminal_snr_is_the_multistep_solver_with_its_small_constant(
    name: str, sampler: str, num_steps: int
) -> None:
    scheduler = multistep(name, sampler, **LINEAR, rescale_betas_zero_snr=True)
    objective = objective_of(name, zero_terminal_snr=True)
    assert difference(objective, sampler, scheduler, num_steps) < (6e-5 if sampler == "dpmpp_2m" else 5.5e-6)


@STEPS
@pytest.mark.parametrize("name", ["eps", "x0", "v"])
def test_heun_is_diffusers_heun_but_for_the_first_x(name: str, num_steps: int) -> None:
    objective = objective_of(name)
    scheduler = diffusers.HeunDiscreteScheduler(**LINEAR, prediction_type=PREDICTION[name], timestep_spacing="trailing")
    as_exported = difference(objective, "heun", scheduler, num_steps)
    assert 1e-3 < as_exported < 3e-3
    scale = 1 / float(objective.grid(num_steps).s[0])
    assert difference(objective, "heun", scheduler, num_steps, scale=scale) < 3e-6


@pytest.mark.parametrize(("spacing", "limit"), [("leading", 3e-6), ("linspace", 3e-3)])
def test_leading_and_linspace_are_diffusers_euler(spacing: str, limit: float) -> None:
    scheduler = diffusers.EulerDiscreteScheduler(
        **LINEAR, prediction_type="v_prediction", timestep_spacing=spacing, steps_offset=1
    )
    assert difference(objective_of("v"), "ddim", scheduler, 30, spacing=spacing) < limit


@pytest.mark.parametrize(("zero_terminal_snr", "num_steps", "limit"), [(True, 20, 2e-6), (False, 20, 2e-6)])
def test_ddim_is_diffusers_ddim_where_the_steps_divide(zero_terminal_snr: bool, num_steps: int, limit: float) -> None:
    scheduler = diffusers.DDIMScheduler(
        **LINEAR,
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        rescale_betas_zero_snr=zero_terminal_snr,
        clip_sample=False,
    )
    objective = objective_of("v", zero_terminal_snr=zero_terminal_snr)
    assert difference(objective, "ddim", scheduler, num_steps) < limit
    assert difference(objective, "ddim", scheduler, 30) > 5e-3


@FIRST_AND_SECOND
@pytest.mark.parametrize(("num_steps", "limit"), [(20, 1.5e-6), (30, 2e-3)])
@pytest.mark.parametrize(("name", "shift"), [("v", 1.0), ("eps", 2.0), ("x0", 1.0)])
def test_cosine_goes_through_1001_trained_betas(
    name: str, shift: float, num_steps: int, limit: float, sampler: str
) -> None:
    objective = objective_of(name, name="cosine", shift=shift)
    betas = betas_of(objective, torch.arange(1001, dtype=torch.float64) / 1000)
    scheduler = multistep(name, sampler, trained_betas=betas, num_train_timesteps=1001, timestep_spacing="linspace")
    assert difference(objective, sampler, scheduler, num_steps) < limit


@STEPS
@FIRST_AND_SECOND
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_is_nearly_the_multistep_solver(shift: float, sampler: str, num_steps: int) -> None:
    scheduler = multistep("flow", sampler, use_flow_sigmas=True, flow_shift=shift)
    assert difference(objective_of("flow", shift=shift), sampler, scheduler, num_steps) < 5.5e-3


@STEPS
@pytest.mark.parametrize("sampler", ["euler", "ddim", "dpmpp_2m"])
def test_edm_is_diffusers_edm_but_for_the_first_x(sampler: str, num_steps: int) -> None:
    second = sampler == "dpmpp_2m"
    scheduler = diffusers.EDMDPMSolverMultistepScheduler() if second else diffusers.EDMEulerScheduler()
    assert difference(objective_of("edm"), sampler, scheduler, num_steps) < 1.2e-4
    scale = 80 / (80**2 + 1) ** 0.5
    assert difference(objective_of("edm"), sampler, scheduler, num_steps, scale=scale) < 2e-6
