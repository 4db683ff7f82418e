"""Noise levels that are given: a sampler visits these, of any schedule, whatever its shift."""

from __future__ import annotations

import pytest
import torch

from daguerre.objectives import eps, flow
from daguerre.samplers.settings import SamplingSettings

LEVELS = [1.0, 0.9, 0.4]


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_visits_the_levels(shift):
    objective = flow.build(flow.Settings.model_validate({"schedule": {"name": "linear_flow", "shift": shift}}))
    grid = objective.grid(3, LEVELS)
    assert grid.s.tolist() == [*LEVELS, 0.0]
    assert torch.equal(grid.a, 1 - grid.s)


def test_other_schedules_visit_levels_of_the_same_signal_to_noise_ratio():
    grid = eps.build(eps.Settings()).grid(2, [0.9, 0.4])
    torch.testing.assert_close((grid.s / (grid.a + grid.s))[:-1], torch.tensor([0.9, 0.4], dtype=torch.float64))


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ([0.4, 0.9], "give shares of noise that fall"),
        ([1.0, 1.0], "give shares of noise that fall"),
        ([1.5, 0.5], "give shares of noise that fall"),
        ([1.0, 0.5, 0.2], "set num_inference_steps=3"),
    ],
)
def test_levels_that_cannot_be_are_refused(levels, said):
    with pytest.raises(ValueError, match=said):
        SamplingSettings(timestep_spacing=levels, num_inference_steps=2)
