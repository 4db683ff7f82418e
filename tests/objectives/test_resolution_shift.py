"""Noise levels that follow the size of the images: against published numbers, and the same in draws and grids."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from daguerre import plugins
from daguerre.objectives.algebra import Diffusion
from daguerre.objectives.settings import ResolutionShiftSettings, ScheduleSettings

KEYS = np.array([[5, 0, 0], [6, 1, 0], [2**62, 0, 3], [5, 1, 0]], dtype=np.int64)
SIDES = [256, 512, 768, 1024, 2048]


def built(name: str, /, **schedule) -> Diffusion:
    module = plugins.find("objectives", name)
    return module.build(module.Settings.model_validate({"schedule": schedule}))


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, [1.6487, 1.8776, 2.3319, 3.1582, 25.28]),  # FLUX.1
        ({"high_px": 8192**0.5 * 16, "high_mu": 0.9}, [1.6487, 1.7138, 1.8280, 2.0008, 3.7169]),  # Qwen-Image
    ],
)
def test_a_straight_line_in_the_area_is_fluxs_dynamic_shift(own, expected):
    settings = ScheduleSettings.model_validate(
        {"name": "linear_flow", "resolution_shift": {"name": "linear_mu", **own}}
    )
    np.testing.assert_allclose([settings.at(side**2).shift for side in SIDES], expected, rtol=2e-4)


def test_the_shift_by_area_is_sd3s():
    """Esser et al. 2024, eq. 23: alpha = sqrt(m / n) of the numbers of pixels; at the base it is `shift` itself."""
    settings = ScheduleSettings.model_validate(
        {"name": "linear_flow", "shift": 3, "resolution_shift": {"name": "area", "base_px": 1024}}
    )
    assert settings.at(1024**2).shift == 3
    assert settings.at(512 * 2048).shift == 3
    assert settings.at(512**2).shift == 1.5


def test_levels_are_those_of_diffusers_dynamic_shifting():
    flow = built("flow", resolution_shift={"name": "linear_mu"})
    flow = flow.at((1, 1024, 1024))
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 10, 10), mu=1.15)
    grid = flow.grid(10)
    np.testing.assert_allclose(grid.s.numpy(), scheduler.sigmas.numpy(), rtol=1e-6)
    np.testing.assert_allclose(flow.c_noise(grid.t_N).numpy(), scheduler.timesteps.numpy(), rtol=1e-6)


@pytest.mark.parametrize("name", ["scaled_linear", "cosine", "linear_flow"])
def test_a_size_has_the_levels_of_its_shift_in_draws_and_grid_to_the_bit(name: str):
    objective = "flow" if name == "linear_flow" else "v"
    moving = built(objective, name=name, shift=1.5, resolution_shift={"name": "area", "base_px": 8})
    still = built(objective, name=name, shift=3.0)
    draws, expected = moving.draws(1, KEYS, (4, 8, 32)).tensors, still.draws(1, KEYS, (4, 8, 32)).tensors
    for level in ("a", "s", "p", "q", "weight", "quantile", "noise"):
        assert torch.equal(draws[level], expected[level])
    grid, wanted = moving.at((4, 8, 32)).grid(10), still.grid(10)
    assert torch.equal(grid.a, wanted.a)
    assert torch.equal(grid.s, wanted.s)
    base = moving.draws(1, KEYS, (4, 8, 8)).tensors
    plain = built(objective, name=name, shift=1.5).draws(1, KEYS, (4, 8, 8)).tensors
    for level in ("a", "s", "c_in", "weight"):
        assert torch.equal(base[level], plain[level])
    np.testing.assert_allclose(base["c_noise"].numpy(), plain["c_noise"].numpy(), rtol=1e-6)
    assert not torch.equal(base["s"], draws["s"])


@pytest.mark.parametrize("name", ["scaled_linear", "cosine", "linear_flow"])
def test_what_the_network_is_told_of_a_level_does_not_follow_the_size(name: str):
    moving = built("flow" if name == "linear_flow" else "v", name=name, resolution_shift={"name": "area", "base_px": 8})
    small, large = moving, moving.at((4, 16, 16))
    t = large.times(torch.linspace(0.1, 0.7, 50, dtype=torch.float64))
    same_level = small.schedule.time_of(*large.path(t))
    np.testing.assert_allclose(large.c_noise(t).numpy(), small.c_noise(same_level).numpy(), rtol=1e-12)


def test_the_size_is_that_of_the_image_not_of_its_latents():
    moving = built("v", resolution_shift={"name": "area", "base_px": 512})
    latent = replace(moving, cell_px=64.0)
    assert latent.at((4, 64, 64)).schedule.settings.shift == 1
    assert latent.at((4, 128, 128)).schedule.settings.shift == 2


def test_what_is_learnt_is_shared_by_all_sizes():
    module = plugins.find("objectives", "v")
    made = module.build(
        module.Settings.model_validate(
            {"weighting": {"name": "adaptive"}, "schedule": {"resolution_shift": {"name": "area"}}}
        )
    )
    assert made.at((4, 8, 8)).learnt is made.learnt


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": "edm", "resolution_shift": {"name": "area"}}, "resolution_shift.*: no effect with 'edm'"),
        (
            {"shift": 2, "resolution_shift": {"name": "linear_mu"}},
            r"shift: linear_mu sets the whole shift: remove it \[",
        ),
        ({"resolution_shift": {"name": "area", "low_mu": 1}}, "low_mu.*: no effect with 'area'"),
        ({"resolution_shift": {"base_px": 512}}, "base_px.*: no effect with 'none'"),
        ({"resolution_shift": {"name": "linear_mu", "low_px": 2048}}, "low_px must be the smaller one"),
    ],
)
def test_what_has_no_effect_is_refused(values, said):
    with pytest.raises(ValueError, match=said):
        ScheduleSettings.model_validate(values)


def test_settings_survive_being_dumped():
    for given in ({}, {"shift": 2.0}, {"resolution_shift": {"name": "linear_mu", "high_mu": 1.0}}):
        settings = ScheduleSettings.model_validate(given)
        assert ScheduleSettings.model_validate(settings.model_dump()) == settings
    assert math.isfinite(ResolutionShiftSettings(name="linear_mu").factor(1e12))


@pytest.mark.parametrize("name", ["area", "linear_mu"])
def test_areas_beyond_floats_have_a_factor(name):
    """A converted config asks before its numbers are checked."""
    assert 0 < ResolutionShiftSettings(name=name).factor(10**400) < float("inf")


@pytest.mark.parametrize("field", ["base_px", "low_px", "high_px"])
@pytest.mark.parametrize("value", [0.0, 1e200, float("inf"), float("nan")])
def test_sides_are_those_of_images(field, value):
    with pytest.raises(ValueError, match=field):
        ResolutionShiftSettings(**{field: value})
