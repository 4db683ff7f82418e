"""What a network is told of the noise level: as ever in every recipe, and its own whatever moves the levels."""

from __future__ import annotations

import math

import diffusers
import numpy as np
import pytest
import torch
from losses import loss_of
from torch import Tensor
from twins import left_to_users

from daguerre import plugins
from daguerre.config import config as configs
from daguerre.config import recipe
from daguerre.objectives.algebra import Diffusion

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

AS_EVER = {
    "scaled_linear": lambda t: t,
    "cosine": lambda t: 1000.0 * t,
    "linear_flow": lambda t: 1000.0 * t,
    "edm": lambda t: torch.tensor([math.log(each) / 4.0 for each in t.tolist()], dtype=torch.float64),
}
"""What each schedule's time was told as before networks had a clock of their own."""
NAMED = {"scaled_linear": "timestep", "linear_flow": "flow_time", "edm": "log_sigma"}


def built(name: str, /, **schedule) -> Diffusion:
    module = plugins.find("objectives", name)
    return module.build(module.Settings.model_validate({"schedule": schedule} if schedule else {}))


def times(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def told_by_cascade(t: Tensor, shift: float) -> Tensor:
    """Without a shift the time, within its ends; with one the time whose noise is the shifted noise of this one."""
    if shift == 1:
        return t.clamp(0.0023, 0.9936)
    first = math.cos(0.008 / 1.008 * math.pi / 2)
    variance = ((torch.cos((0.008 + t) / 1.008 * math.pi / 2) / first) ** 2).clamp(0.0001, 0.9999)
    shifted = (1 / (1 + shift**2 * (1 - variance) / variance)).clamp(0.0001, 0.9999)
    return torch.acos(first * shifted.sqrt()) / (math.pi / 2) * 1.008 - 0.008


@pytest.mark.parametrize("name", recipe.shipped())
def test_every_recipe_tells_its_network_what_it_always_told_to_the_bit(name: str):
    config = configs.load(name, left_to_users(name)).config
    objective = plugins.find("objectives", config.objective.name).build(config.objective)
    if not isinstance(objective, Diffusion):
        return
    kind = objective.settings.schedule.name
    uniform = torch.from_numpy(np.random.default_rng(0).random(4000))
    drawn = objective.times(torch.cat([uniform, times(0, 1 - 2**-53)]))
    visited = objective.grid(config.sampling.num_inference_steps, config.sampling.timestep_spacing).t_N
    for t in (drawn, visited):
        if kind == "cosine":  # Stable Cascade's networks, told the time of the level, which is clamped at both ends
            named = objective.with_noise_conditioning(config.model.noise_conditioning, config.model.time_scale)
            expected = told_by_cascade(t, objective.settings.schedule.shift)
            torch.testing.assert_close(named.c_noise(t), expected, rtol=0, atol=1e-4)
            continue
        if kind == "linear_flow":  # transformers of diffusers are given the time itself, its UNets 1000 t
            named = objective.with_noise_conditioning("auto", config.model.time_scale)
            assert torch.equal(named.c_noise(t), t * config.model.time_scale)
            continue
        assert torch.equal(objective.c_noise(t), AS_EVER[kind](t))
        # By the level alone, without the time.
        named = objective.with_noise_conditioning(NAMED[kind], config.model.time_scale)
        assert torch.equal(named.c_noise(t), AS_EVER[kind](t))


@pytest.mark.parametrize(("name", "kind"), [("eps", "cosine"), ("flow", "linear_flow"), ("eps", "scaled_linear")])
def test_a_time_between_is_told_to_the_last_bit_but_one(name: str, kind: str):
    objective = built(name, name=kind)
    named = objective.with_noise_conditioning({**NAMED, "cosine": "cosine_time"}[kind], 1000.0)
    t = objective.schedule.time(torch.linspace(0.004, 0.99, 999, dtype=torch.float64)) * (1 - 1e-3)
    np.testing.assert_allclose(named.c_noise(t).numpy(), objective.c_noise(t).numpy(), rtol=1e-11, atol=1e-11)


def test_cascade_with_a_shift_of_two_tells_what_its_code_tells():
    """Stable Cascade's CosineSchedule with shift 2, then its CosineTNoiseCond: 0.509 at t = 0.3."""
    shifted = built("eps", name="cosine", shift=2.0).with_noise_conditioning("cosine_time", 1.0)
    told = told_by_cascade(times(0.3), 2.0).item()
    assert told == pytest.approx(0.509, abs=5e-4)
    assert shifted.c_noise(times(0.3)).item() == pytest.approx(told, abs=1e-12)


def test_cascade_without_a_shift_tells_the_time_but_at_the_clamped_ends():
    plain = built("eps", name="cosine").with_noise_conditioning("cosine_time", 1.0)
    inner = torch.linspace(0.0024, 0.9935, 500, dtype=torch.float64)
    np.testing.assert_allclose(plain.c_noise(inner).numpy(), inner.numpy(), atol=1e-12)
    np.testing.assert_allclose(plain.c_noise(times(0, 1)).numpy(), [0.0023, 0.9936], atol=5e-5)


def test_cascades_levels_are_those_of_diffusers():
    scheduler, plain = diffusers.DDPMWuerstchenScheduler(), built("eps", name="cosine")
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    theirs = scheduler._alpha_cumprod(t.float(), torch.device("cpu"))
    np.testing.assert_allclose(plain.path(t)[0].square().numpy(), theirs.numpy(), atol=2e-7)


@pytest.mark.parametrize("name", ["scaled_linear", "cosine"])
def test_a_named_number_belongs_to_the_level_whatever_the_shift(name: str):
    told = {"scaled_linear": "timestep", "cosine": "cosine_time"}[name]
    plain, shifted = (built("v", name=name, shift=shift).with_noise_conditioning(told, 1000.0) for shift in (1.0, 2.0))
    t = plain.schedule.time(times(0.1, 0.3, 0.5, 0.7))
    a, s = shifted.path(t)
    same_level = plain.schedule.time_of(a, s)
    np.testing.assert_allclose(shifted.c_noise(t).numpy(), plain.c_noise(same_level).numpy(), rtol=1e-12)
    assert (shifted.c_noise(t) > plain.c_noise(t)).all()


def test_edm_can_tell_stable_diffusions_timesteps():
    """As EulerDiscreteScheduler finds the timestep of a sigma, but along sigma in place of its logarithm."""
    sigmas = times(0.02, 0.0291671, 0.3, 1.0, 3.0, 14.61, 80.0)
    told = built("edm").with_noise_conditioning("timestep", 1000.0).c_noise(sigmas)
    scheduler = diffusers.EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    logs = np.log(((1 - scheduler.alphas_cumprod) / scheduler.alphas_cumprod).numpy() ** 0.5)
    theirs = [float(scheduler._sigma_to_t(sigma, logs)) for sigma in sigmas.numpy()]
    np.testing.assert_allclose(told.numpy(), theirs, atol=0.02)


@pytest.mark.parametrize(("name", "schedule"), [("flow", {}), ("v", {"zero_terminal_snr": True})])
def test_pure_noise_has_no_log_sigma(name: str, schedule: dict):
    with pytest.raises(ValueError, match=r"noise_conditioning is log_sigma.*pure noise.*choose timestep"):
        built(name, **schedule).with_noise_conditioning("log_sigma", 1000.0)


def test_the_network_is_told_by_the_level_in_training_and_sampling():
    objective, seen = built("edm").with_noise_conditioning("timestep", 1000.0), []

    def net(x: Tensor, c_noise: Tensor, cond) -> Tensor:
        seen.append(c_noise)
        return x

    draws = objective.draws(3, np.array([[1, 0, 0], [2, 0, 0]]), (1, 2, 2)).tensors
    loss_of(objective, net, torch.zeros(2, 1, 2, 2), {}, draws)
    objective.predict(net, torch.zeros(2, 1, 2, 2), 3.0, {})
    clock = objective.noise_conditioning.clock
    expected = clock.time_of(torch.ones(2), draws["s"].double())
    np.testing.assert_allclose(seen[0].numpy(), expected.numpy(), rtol=1e-6)
    assert seen[1].tolist() == [float(clock.time_of(times(1.0), times(3.0)).float())] * 2
