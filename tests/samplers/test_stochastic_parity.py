"""UniPC and the samplers with fresh noise beside diffusers' schedulers, the same noise in both, every x compared."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from diffusers_noise import inject
from schedulers import objective_of, run_ours, run_scheduler
from test_scheduler_parity import LATENTS, LINEAR, PREDICTION, assert_same_way, net
from torch import Tensor

from daguerre.objectives.algebra import Diffusion
from daguerre.samplers import heun

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:diffusers")
STEPS = pytest.mark.parametrize("num_steps", [10, 30])


def fresh_noise(step: int) -> Tensor:
    return torch.randn(LATENTS.shape, generator=torch.Generator().manual_seed(step))


@pytest.fixture(autouse=True)
def one_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers draws step j's noise as ours does; a scheduler starts from step 0."""
    inject(monkeypatch, fresh_noise)


def compare(objective: Diffusion, sampler: str, scheduler: Any, num_steps: int, tolerance: float = 1e-5) -> None:
    """From the same first x, whatever the scheduler starts from."""
    scheduler.set_timesteps(num_steps)
    grid = objective.grid(num_steps)
    own = {"fresh_noise": fresh_noise} if sampler != "unipc" else {}
    ours = run_ours(objective, sampler, net, LATENTS, grid, **own)
    visited = scheduler.scale_model_input(LATENTS * scheduler.init_noise_sigma, scheduler.timesteps[0])
    scheduler.set_timesteps(num_steps)  # forgets the step
    scale = float(ours[0].flatten()[0] / visited.flatten()[0])
    assert_same_way(ours, run_scheduler(scheduler, net, LATENTS * scale, num_steps), tolerance)


@STEPS
@pytest.mark.parametrize("name", ["eps", "v"])
def test_euler_ancestral_is_diffusers(name: str, num_steps: int) -> None:
    scheduler = diffusers.EulerAncestralDiscreteScheduler(
        **LINEAR, prediction_type=PREDICTION[name], timestep_spacing="trailing"
    )
    compare(objective_of(name), "euler_ancestral", scheduler, num_steps)


@STEPS
@pytest.mark.parametrize(("sampler", "order"), [("euler_ancestral", 1), ("dpmpp_2m_sde", 2)])
@pytest.mark.parametrize("name", PREDICTION)
def test_2m_sde_is_diffusers_and_its_first_order_is_euler_ancestral(
    name: str, sampler: str, order: int, num_steps: int
) -> None:
    scheduler = diffusers.DPMSolverMultistepScheduler(
        **LINEAR,
        prediction_type=PREDICTION[name],
        timestep_spacing="trailing",
        algorithm_type="sde-dpmsolver++",
        solver_order=order,
    )
    compare(objective_of(name), sampler, scheduler, num_steps)


@STEPS
@pytest.mark.parametrize("name", PREDICTION)
def test_unipc_is_diffusers(name: str, num_steps: int) -> None:
    scheduler = diffusers.UniPCMultistepScheduler(
        **LINEAR, prediction_type=PREDICTION[name], timestep_spacing="trailing"
    )
    compare(objective_of(name), "unipc", scheduler, num_steps)


@pytest.mark.parametrize("num_steps", [1, 2, 4, 8])
@pytest.mark.parametrize("name", PREDICTION)
def test_lcm_is_diffusers_but_for_its_skip(name: str, num_steps: int) -> None:
    scheduler = diffusers.LCMScheduler(
        **LINEAR, prediction_type=PREDICTION[name], original_inference_steps=1000, clip_sample=False
    )
    compare(objective_of(name), "lcm", scheduler, num_steps)


def test_lcms_skip_is_within_1e5_above_timestep_15() -> None:
    scheduler = diffusers.LCMScheduler()
    c_skip, c_out = scheduler.get_scalings_for_boundary_condition_discrete(16)
    assert c_skip < 1e-5
    assert 1 - c_out < 1e-5


@pytest.mark.parametrize(("sampler", "order"), [("euler_ancestral", 1), ("dpmpp_2m_sde", 2)])
def test_edm_is_diffusers_edm_solver_of_the_sde(sampler: str, order: int) -> None:
    scheduler = diffusers.EDMDPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++", solver_order=order)
    compare(objective_of("edm"), sampler, scheduler, 20)


def algorithm_2(denoise: Any, x: Tensor, sigma: list[float], churn: float, low: float, high: float, more: float) -> Any:
    """Karras et al. 2022, algorithm 2 as printed: t_i are noise levels, D(x; sigma) the denoiser of x0 + sigma eps."""
    for i in range(len(sigma) - 1):
        gamma = min(churn / (len(sigma) - 1), 2**0.5 - 1) if low <= sigma[i] <= high else 0.0
        hat = sigma[i] + gamma * sigma[i]
        x_hat = x + (hat**2 - sigma[i] ** 2) ** 0.5 * more * fresh_noise(i).double()
        d = (x_hat - denoise(x_hat, hat)) / hat
        x = x_hat + (sigma[i + 1] - hat) * d
        if sigma[i + 1] != 0:
            d_ahead = (x - denoise(x, sigma[i + 1])) / sigma[i + 1]
            x = x_hat + (sigma[i + 1] - hat) * (d + d_ahead) / 2
    return x


@pytest.mark.parametrize("churn", [0.0, 2.0, 100.0])
@pytest.mark.parametrize(("low", "high", "more"), [(0.0, 9.0, 1.0), (0.1, 5.0, 1.003)])
@pytest.mark.parametrize(("name", "schedule"), [("edm", {}), ("eps", {}), ("x0", {"name": "cosine"})], ids=str)
def test_churn_is_algorithm_2(
    name: str, schedule: dict[str, Any], low: float, high: float, more: float, churn: float
) -> None:
    objective = objective_of(name, **schedule)
    grid = objective.grid(12)

    def denoise(x: Tensor, t: float) -> Tensor:
        """Some x0, another one at every noise level."""
        a, s = objective.path(torch.tensor(t, dtype=torch.float64))
        return torch.tanh(x / (a**2 + s**2).sqrt() + 0.3 * torch.log(1 + s / a))

    def of_sigma(x: Tensor, sigma: float) -> Tensor:
        t, a, _ = objective.level(sigma)
        return denoise(a * x, t)

    x = grid.prior_std * LATENTS.double()
    given = {"s_churn": churn, "s_tmin": low, "s_tmax": high, "s_noise": more}
    ours = heun.sample(denoise, x, grid, fresh_noise=lambda j: fresh_noise(j).double(), level=objective.level, **given)
    theirs = algorithm_2(of_sigma, x / grid.a[0], (grid.s / grid.a).tolist(), churn, low, high, more)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    assert (churn > 0) == (float((ours - heun.sample(denoise, x, grid)).abs().max()) > 1e-3)
