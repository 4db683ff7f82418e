"""Parity of paths, targets, scalings and sampling times with diffusers' schedulers, at toy size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DDPMWuerstchenScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.schedulers.scheduling_ddim import rescale_zero_terminal_snr

from daguerre import plugins
from daguerre.objectives.algebra import Diffusion

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
T = torch.tensor([0, 1, 147, 500, 999])
X0, EPS = torch.randn(2, len(T), 4, 2, 2, generator=torch.Generator().manual_seed(0))
STEPS = [2, 3, 7, 10, 16, 25, 30, 48, 50, 333, 999]


def built(name: str, **values) -> Diffusion:
    module = plugins.find("objectives", name)
    return module.build(module.Settings(**values))


def mixed(coefficients: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    of_x0, of_eps = (c.float().reshape(-1, 1, 1, 1) for c in coefficients)
    return of_x0 * X0 + of_eps * EPS


def test_noisy_samples_and_velocity():
    scheduler, v = DDPMScheduler(**BETAS), built("v")
    path = v.path(T.double())
    torch.testing.assert_close(mixed(path), scheduler.add_noise(X0, EPS, T), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mixed(v.target(*path)), scheduler.get_velocity(X0, EPS, T), rtol=1e-4, atol=1e-5)


def test_x0_of_each_prediction_type():
    for name, kind in (("eps", "epsilon"), ("x0", "sample"), ("v", "v_prediction")):
        scheduler = DDIMScheduler(**BETAS, prediction_type=kind, clip_sample=False, set_alpha_to_one=True)
        scheduler.set_timesteps(1000)
        objective = built(name)
        for t in (1, 147, 500, 998):
            a, s = objective.path(torch.tensor(t, dtype=torch.float64))
            x0, _ = objective.solve(X0, EPS, a, s)  # any x_t and y will do
            expected = scheduler.step(EPS, t, X0).pred_original_sample
            torch.testing.assert_close(x0, expected, rtol=2e-4, atol=2e-4)


def test_zero_terminal_snr():
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    expected = (1 - rescale_zero_terminal_snr(betas)).cumprod(0).sqrt()
    a, _ = built("v", schedule={"zero_terminal_snr": True}).path(torch.arange(1000, dtype=torch.float64))
    np.testing.assert_allclose(a, expected, atol=2e-5)
    assert a[-1] == expected[-1] == 0


def test_cosine_is_wuerstchens():
    t = torch.linspace(0, 1, 21)
    a, _ = built("v", schedule={"name": "cosine"}).path(t.double())
    np.testing.assert_allclose(a**2, DDPMWuerstchenScheduler()._alpha_cumprod(t, torch.device("cpu")), atol=1e-6)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_path_and_shift(shift: float):
    scheduler, flow = FlowMatchEulerDiscreteScheduler(shift=shift), built("flow", schedule={"shift": shift})
    grid = flow.grid(8)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 8, 8))
    np.testing.assert_allclose(flow.c_noise(grid.t_N), scheduler.timesteps, rtol=1e-6)
    np.testing.assert_allclose(grid.s, scheduler.sigmas, rtol=1e-6)
    rows = torch.arange(len(T))
    expected = scheduler.scale_noise(X0, scheduler.timesteps[rows], EPS)
    torch.testing.assert_close(mixed(flow.path(grid.t_N[rows])), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "kind"),
    [({}, "epsilon"), ({"prediction": "v"}, "v_prediction"), ({"prediction": "v", "sigma_data": 1.0}, "v_prediction")],
)
def test_edm_scalings_and_grid(values, kind):
    sigma_data = values.get("sigma_data", 0.5)
    scheduler = EDMEulerScheduler(sigma_min=0.002, sigma_max=80.0, sigma_data=sigma_data, prediction_type=kind)
    edm, sigma = built("edm", **values), torch.tensor(1.7, dtype=torch.float64)
    x0, _ = edm.solve(X0, EPS, *edm.path(sigma))
    torch.testing.assert_close(x0, scheduler.precondition_outputs(X0, EPS, sigma.float()))
    assert edm.input_scale(*edm.path(sigma)).item() == pytest.approx(scheduler._get_conditioning_c_in(1.7))
    scheduler.set_timesteps(12)
    grid = edm.grid(12)
    np.testing.assert_allclose(grid.s, scheduler.sigmas, rtol=1e-6)
    np.testing.assert_allclose(edm.c_noise(grid.t_N), scheduler.timesteps, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers under numpy 2
@pytest.mark.parametrize("spacing", ["trailing", "leading", "linspace"])
def test_timesteps_and_sigmas_of_euler(spacing: str):
    scheduler = EulerDiscreteScheduler(**BETAS, timestep_spacing=spacing, steps_offset=1)
    eps = built("eps")
    for steps in STEPS:
        scheduler.set_timesteps(steps)
        grid = eps.grid(steps, spacing)
        np.testing.assert_allclose(grid.t_N, scheduler.timesteps, rtol=1e-6, err_msg=f"{steps} steps")
        np.testing.assert_allclose(grid.s / grid.a, scheduler.sigmas, rtol=3e-4, err_msg=f"{steps} steps")


@pytest.mark.parametrize("spacing", ["trailing", "leading", "linspace"])
def test_timesteps_of_ddim(spacing: str):
    scheduler = DDIMScheduler(**BETAS, timestep_spacing=spacing, steps_offset=1)
    for steps in STEPS:
        scheduler.set_timesteps(steps)
        got = built("eps").grid(steps, spacing).t_N.numpy()
        expected = scheduler.timesteps.numpy()
        np.testing.assert_array_equal(got.round() if spacing == "linspace" else got, expected, err_msg=f"{steps} steps")


def test_every_number_of_trailing_steps():
    eps = built("eps")
    for steps in range(1, 1001):
        expected = np.round(np.arange(1000, 0, -1000 / steps))[:steps] - 1
        got = eps.grid(steps).t_N.numpy()
        np.testing.assert_array_equal(got, expected)
        assert (np.diff(got) < 0).all()
