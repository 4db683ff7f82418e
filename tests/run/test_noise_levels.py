"""Settings of noise levels from the recipe to the parts: what the network is told, and at which levels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from daguerre.assembly import parts
from daguerre.assembly.parts import Components
from daguerre.cli import main
from daguerre.config import config as configs

KEYS = np.array([[5, 0, 0], [6, 1, 0], [2**62, 0, 3]], dtype=np.int64)


def outlined(*given: str, recipe: str = "quickstart") -> Components:
    return parts.outline(configs.load(recipe, given).config)


def test_the_quickstart_is_told_timesteps_by_either_name_to_the_bit():
    usual, named = (outlined(*more).objective.draws(0, KEYS, (4, 8, 8)).tensors for more in ((), (TIMESTEP,)))
    assert all(torch.equal(usual[name], named[name]) for name in usual)
    assert torch.equal(usual["c_noise"], usual["c_noise"].round())


def test_edm_tells_the_network_what_the_recipe_says():
    usual, named = (outlined(*EDM, *more).objective.draws(0, KEYS, (4, 8, 8)).tensors for more in ((), (TIMESTEP,)))
    assert torch.allclose(usual["c_noise"], usual["s"].log() / 4)
    assert named["c_noise"][usual["s"].argsort()].diff().gt(0).all()
    assert named["c_noise"].max() > 50
    assert all(torch.equal(usual[name], named[name]) for name in usual if name != "c_noise")


def test_an_objective_without_noise_levels_refuses_to_tell_any():
    with pytest.raises(
        ValueError, match=r"noise_conditioning has no effect.*contrastive is not a diffusion.*remove the setting"
    ):
        outlined("objective.name=contrastive", TIMESTEP)


def test_each_bucket_has_the_shift_of_its_size():
    given = ("objective.schedule.resolution_shift.name=area", "objective.schedule.resolution_shift.base_px=32")
    made = outlined(*given)
    shape = made.family.latent_shape((3, 64, 64))
    assert made.objective.cell_px == 64 * 64 / (shape[1] * shape[2])
    draws, expected = (
        each.objective.draws(0, KEYS, shape).tensors for each in (made, outlined("objective.schedule.shift=2"))
    )
    assert torch.equal(draws["s"], expected["s"])
    assert made.objective.sampled().schedule.settings.shift == 2
    small = made.objective.draws(0, KEYS, made.family.latent_shape((3, 32, 32))).tensors
    assert torch.equal(small["s"], outlined().objective.draws(0, KEYS, shape).s)


def test_the_shifts_are_said_before_a_run(capsys):
    given = ["objective.schedule.resolution_shift.name=area", "objective.schedule.resolution_shift.base_px=32"]
    assert main.run(["train", "quickstart", *given, "--dry-run"]) == 0
    assert "shift of the noise levels: 64x64 2" in capsys.readouterr().out
    assert main.run(["train", "quickstart", "--dry-run"]) == 0
    assert "shift of the noise levels" not in capsys.readouterr().out


def test_a_sampling_shift_is_refused_before_training_where_there_is_none():
    with pytest.raises(ValueError, match=r"sampling.shift is 2, and schedule edm has no shift"):
        outlined(*EDM, "sampling.shift=2")
    assert outlined("sampling.shift=2", "shift=1.5").objective.settings.schedule.shift == 1.5


TIMESTEP = "model.noise_conditioning=timestep"
EDM = ("objective.name=edm",)
