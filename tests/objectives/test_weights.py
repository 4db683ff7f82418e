"""Weights against their papers' closed forms, in every prediction space, and at both ends of the schedule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr

from daguerre import plugins
from daguerre.objectives.levels.schedules import from_sigma
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


@pytest.mark.parametrize("gamma", [1.0, 5.0])
@pytest.mark.parametrize("name", ["eps", "v", "x0"])
def test_min_snr_is_diffusers_at_every_timestep(name: str, gamma: float):
    """As diffusers' training scripts have it, from `compute_snr`."""
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    snr = compute_snr(scheduler, torch.arange(1000)).double()
    clipped = snr.clamp(max=gamma)
    expected = {"eps": clipped / snr, "v": clipped / (snr + 1), "x0": clipped}[name]
    made = built(name, {"name": "min_snr", "snr_gamma": gamma})
    weight = made.weight(*made.path(torch.arange(1000, dtype=torch.float64)))
    np.testing.assert_allclose(weight, expected, rtol=2e-4)


def test_min_snr_of_edm_and_flow():
    """F weighs the x0 error by 1/c_out^2 = (s^2 + d^2)/(s d)^2; the speed at t = s/(1 + s) by 1/t^2."""
    clipped = SNR.clamp(max=5)
    edm, flow = (built(name, {"name": "min_snr"}).weight(*paths(name)) for name in ("edm", "flow"))
    np.testing.assert_allclose(edm, clipped * (SIGMA * 0.5) ** 2 / (SIGMA**2 + 0.25), rtol=1e-12)
    np.testing.assert_allclose(flow, clipped * (SIGMA / (1 + SIGMA)) ** 2, rtol=1e-12)
    np.testing.assert_allclose(edm, [0.048077, 0.555556, 0.5, 0.2, 0.058824], rtol=1e-5)
    np.testing.assert_allclose(flow, [0.041322, 0.477458, 0.444444, 0.25, 0.111111], rtol=1e-5)


def test_min_snr_of_v_at_the_noisy_end_is_not_mindones():
    weight = built("v", {"name": "min_snr"}).weight(*from_sigma(torch.tensor(14.61464123, dtype=torch.float64)))
    x0_weight = weight.item() * (14.61464123**2 + 1) / 14.61464123**2
    assert x0_weight == pytest.approx(0.00468, rel=1e-3)  # min(SNR + 1, gamma) would give 1.0047


def test_p2_of_eps_and_x0():
    p2 = {"name": "p2", "p2_k": 0.5, "p2_gamma": 1.5}
    a, s = from_sigma(SIGMA)
    np.testing.assert_allclose(built("eps", p2).weight(a, s), (0.5 + SNR) ** -1.5, rtol=1e-13)
    np.testing.assert_allclose(built("x0", p2).weight(a, s), SNR * (0.5 + SNR) ** -1.5, rtol=1e-13)


W = {
    "min_snr": lambda gamma: SNR.clamp(max=gamma),
    "soft_min_snr": lambda gamma: SNR * gamma / (SNR + gamma),
    "debiased": lambda gamma: SNR.sqrt(),
    "p2": lambda gamma: SNR / (1 + SNR) ** gamma,
}
"""Weights of the x0 error."""


@pytest.mark.parametrize("gamma", [1.0, 5.0])
@pytest.mark.parametrize("kind", W)
def test_every_objective_weighs_the_x0_error_alike(plugin, kind: str, gamma: float):
    name = plugin.Settings().name
    option = {"p2": {"p2_gamma": gamma}, "debiased": {}}.get(kind, {"snr_gamma": gamma})
    weighting = {"name": kind} | option
    a, s = paths(name)
    made = built(name, weighting)
    p, q = made.target(a, s)
    np.testing.assert_allclose(made.weight(a, s), W[kind](gamma) * (s / (a * q - s * p)) ** 2, rtol=1e-13)


def test_none_is_one_in_prediction_space(plugin):
    assert (built(plugin.Settings().name, {"name": "none"}).weight(*paths(plugin.Settings().name)) == 1).all()


def test_debiased_is_one_over_the_root_of_snr_for_eps():
    np.testing.assert_allclose(built("eps", {"name": "debiased"}).weight(*from_sigma(SIGMA)), SIGMA, rtol=1e-13)


@pytest.mark.parametrize("weighting", [*({"name": name} for name in W), {"name": "p2", "p2_gamma": 0.5}])
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
    for name in W:
        made = built("flow", {"name": name})
        assert made.weight(*made.path(clean)) == 0


def test_gamma_of_p2_zero_is_refused():
    with pytest.raises(ValueError, match="greater than 0"):
        WeightingSettings(name="p2", p2_gamma=0)
