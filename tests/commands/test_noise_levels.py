"""Settings of noise levels from the recipe to the parts: what the network is told, and at which levels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from daguerre import config as configs
from daguerre.commands import parts
from daguerre.commands.parts import Parts

KEYS = np.array([[5, 0, 0], [6, 1, 0], [2**62, 0, 3]], dtype=np.int64)


def outlined(*given: str, recipe: str = "quickstart") -> Parts:
    return parts.outline(configs.load(recipe, given).config)


def test_the_quickstart_is_told_timesteps_by_either_name_to_the_bit():
    usual, named = (outlined(*more).objective.draws(0, KEYS, (4, 8, 8)) for more in ((), (TIMESTEP,)))
    assert all(torch.equal(usual[name], named[name]) for name in usual)
    assert torch.equal(usual["c_noise"], usual["c_noise"].round())


def test_edm_tells_the_network_what_the_recipe_says():
    usual, named = (outlined(*EDM, *more).objective.draws(0, KEYS, (4, 8, 8)) for more in ((), (TIMESTEP,)))
    assert torch.allclose(usual["c_noise"], usual["s"].log() / 4)
    assert named["c_noise"][usual["s"].argsort()].diff().gt(0).all()
    assert named["c_noise"].max() > 50
    assert all(torch.equal(usual[name], named[name]) for name in usual if name != "c_noise")


def test_an_objective_without_noise_levels_refuses_to_tell_any():
    with pytest.raises(ValueError, match=r"noise_conditioning has no effect.*contrastive is no diffusion.*remove it"):
        outlined("objective.name=contrastive", TIMESTEP)


TIMESTEP = "model.noise_conditioning=timestep"
EDM = ("objective.name=edm",)
