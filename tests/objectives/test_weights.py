"""Weights against their papers' closed forms, in every prediction space, and at both ends of the schedule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from daguerre import plugins
from daguerre.objectives.schedules import from_sigma
from daguerre.objectives.settings import WeightingSettings

SIGMA = torch.tensor([0.1, 5**-0.5, 0.5, 1.0, 2.0], dtype=torch.float64)
SNR = SIGMA**-2
ENDS = [0.0, 0.5, 1 - 2**-53]


def built(name: str, weighting: dict, **sections):
    module = plugins.find("objectives", name)
    return module.build(module.Settings(weighting=weighting, **sections))


def paths(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(a, s) of the objective's own path where s/a is SIGMA."""
    if name == "edm":
        return torch.ones_like(SIGMA), SIGMA
    if name == "flow":
        return 1 / (1 + SIGMA), SIGMA / (1 + SIGMA)
    return from_sigma(SIGMA)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("eps", [0.05, 1, 1, 1, 1]), ("v", [0.049505, 0.833333, 0.8, 0.5, 0.2]), ("x0", [5, 5, 4, 1, 0.25])],
)
def test_min_snr_table(name: str, expected: list[float]):
    weight = built(name, {"name": "min_snr"}).weight(*from_sigma(SIGMA))
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-5)


def test_min_snr_of_v_at_the_noisy_end_is_not_mindones():
    weight = built("v", {"name": "min_snr"}).weight(*from_sigma(torch.tensor(14.61464123, dtype=torch.float64)))
    x0_weight = weight.item() * (14.61464123**2 + 1) / 14.61464123**2
    assert x0_weight == pytest.approx(0.00468, rel=1e-3)  # min(SNR + 1, gamma) would give 1.0047


def test_p2_of_eps_and_x0():
    p2 = {"name": "p2", "p2_k": 0.5, "p2_gamma": 1.5}
    a, s = from_sigma(SIGMA)
    np.testing.assert_allclose(built("eps", p2).weight(a, s), (0.5 + SNR) ** -1.5, rtol=1e-13)
    np.testing.assert_allclose(built("x0", p2).weight(a, s), SNR * (0.5 + SNR) ** -1.5, rtol=1e-13)


@pytest.mark.parametrize("gamma", [1.0, 5.0])
@pytest.mark.parametrize("kind", ["min_snr", "p2"])
def test_every_objective_weighs_the_x0_error_alike(plugin, kind: str, gamma: float):
    name = plugin.Settings().name
    weighting = {"name": kind, "snr_gamma": gamma} if kind == "min_snr" else {"name": kind, "p2_gamma": gamma}
    a, s = paths(name)
    made = built(name, weighting)
    p, q = made.target(a, s)
    w = SNR.clamp(max=gamma) if kind == "min_snr" else SNR / (1 + SNR) ** gamma
    np.testing.assert_allclose(made.weight(a, s), w * (s / (a * q - s * p)) ** 2, rtol=1e-13)


def test_none_is_one_in_prediction_space(plugin):
    assert (built(plugin.Settings().name, {"name": "none"}).weight(*paths(plugin.Settings().name)) == 1).all()


@pytest.mark.parametrize("weighting", [{"name": "min_snr"}, {"name": "p2"}, {"name": "p2", "p2_gamma": 0.5}])
def test_weights_are_finite_at_every_level_that_training_draws(plugin, weighting: dict):
    made = built(plugin.Settings().name, weighting)
    weight = made.weight(*made.path(made.times(torch.tensor([*ENDS, *np.linspace(0, 0.999, 1000)]).double())))
    assert weight.isfinite().all()
    assert (weight >= 0).all()


def test_v_has_weight_zero_at_zero_terminal_snr():
    made = built("v", {"name": "min_snr"}, schedule={"zero_terminal_snr": True})
    assert made.weight(*made.path(torch.tensor(999.0, dtype=torch.float64))) == 0


def test_limits_at_the_clean_end_of_the_flow():
    clean = torch.tensor(0.0, dtype=torch.float64)
    for weighting in ({"name": "min_snr"}, {"name": "p2"}):
        made = built("flow", weighting)
        assert made.weight(*made.path(clean)) == 0


def test_gamma_of_p2_zero_is_refused():
    with pytest.raises(ValueError, match="greater than 0"):
        WeightingSettings(name="p2", p2_gamma=0)
