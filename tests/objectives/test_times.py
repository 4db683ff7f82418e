"""Time laws and their bias against closed forms."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quick_cases import crossed

from daguerre import plugins
from daguerre.objectives.levels.elementwise import normal_quantile
from daguerre.objectives.levels.times import biased, law
from daguerre.objectives.settings import TimesSettings, TimestepBiasSettings

QUANTILES = torch.tensor([1e-9, 1e-3, 0.158655253931457, 0.5, 0.841344746068543, 0.999], dtype=torch.float64)


@given(st.floats(2.0**-54, 1 - 2.0**-53))
def test_normal_quantile_is_accurate(quantile: float):
    got = normal_quantile(torch.tensor([quantile], dtype=torch.float64)).item()
    expected = torch.special.ndtri(torch.tensor(quantile, dtype=torch.float64)).item()
    assert math.isclose(got, expected, rel_tol=1e-12, abs_tol=1e-12)


def test_normal_quantile_is_finite_at_both_ends():
    ends = normal_quantile(torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert ends[0] < -8
    assert ends[1] > 8
    assert ends.isfinite().all()


def test_uniform_is_the_quantile_itself():
    assert law(TimesSettings(), QUANTILES) is QUANTILES


def test_log_normal():
    sigma = law(TimesSettings(name="log_normal", mean=-1.2, std=1.2), QUANTILES).log().numpy()
    expected = [-1.2 + 1.2 * NormalDist().inv_cdf(q) for q in QUANTILES.tolist()]
    np.testing.assert_allclose(sigma, expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(sigma[[2, 3, 4]], [-2.4, -1.2, 0], atol=1e-12)


def test_logit_normal():
    t = law(TimesSettings(name="logit_normal", mean=0.5, std=2.0), QUANTILES).numpy()
    np.testing.assert_allclose(t[[2, 3, 4]], [1 / (1 + math.exp(-x)) for x in (-1.5, 0.5, 2.5)], rtol=1e-12)
    assert (np.diff(t) > 0).all()


BIASES = {
    # values: (steps of the slice of 1000, mean step)
    "later": ({"multiplier": 2.0}, (750, 1000), 574.5),
    "earlier": ({"multiplier": 2.0}, (0, 250), 424.5),
    "range": ({"multiplier": 2.0, "begin": 200, "end": 500}, (200, 500), 464.884615),
}


def bias(name: str, **values) -> TimestepBiasSettings:
    return TimestepBiasSettings(name=name, **values)


def even(count: int) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


@pytest.mark.parametrize("name", BIASES)
def test_mean_step_of_each_bias(name: str):
    values, slice_, mean = BIASES[name]
    settings = bias(name, **values)
    assert settings.slice(1000) == slice_
    steps = (biased(settings, 1000, even(1_300_000)) * 1000).floor()
    assert steps.mean().item() == pytest.approx(mean, abs=2e-3)


@pytest.mark.parametrize(("name", "multiplier"), crossed([*BIASES], [1e-3, 0.5, 1.0, 2.0, 7.3, 1e6]))
def test_steps_are_drawn_as_by_weights(name: str, multiplier: float):
    """By the rule of the other trainers: a weight of 1 a step, of `multiplier` in the slice, normalised."""
    values, slice_, _ = BIASES[name]
    settings, num_steps, count = bias(name, **values | {"multiplier": multiplier}), 1000, 2_000_000
    weights = np.ones(num_steps)
    weights[slice(*slice_)] *= multiplier
    steps = (biased(settings, num_steps, even(count)) * num_steps).floor().long()
    counts = torch.bincount(steps, minlength=num_steps).numpy()
    np.testing.assert_allclose(counts, count * weights / weights.sum(), atol=1.01)


@given(
    uniform=st.lists(st.floats(0, 1 - 2.0**-53), min_size=2, max_size=2),
    multiplier=st.floats(1e-300, 1e300),
    begin=st.integers(0, 6),
    length=st.integers(1, 7),
)
def test_a_bias_rises_and_stays_in_range(uniform: list[float], multiplier: float, begin: int, length: int):
    settings = bias("range", multiplier=multiplier, begin=begin, end=min(begin + length, 7))
    low, high = biased(settings, 7, torch.tensor(sorted(uniform), dtype=torch.float64)).tolist()
    assert 0 <= low <= high < 1


def test_no_bias_is_the_same_numbers():
    assert biased(bias("none"), 1000, QUANTILES) is QUANTILES
    torch.testing.assert_close(biased(bias("later", multiplier=1.0), 1000, QUANTILES), QUANTILES, rtol=1e-14, atol=0)


def test_a_portion_is_whole_steps_rounded_down():
    assert bias("later", portion=0.259).slice(100) == (75, 100)
    assert bias("earlier", portion=1.0).slice(7) == (0, 7)
    assert bias("range", begin=3).slice(10) == (3, 10)


def test_under_edm_a_bias_holds_on_the_quantile_of_sigma():
    """ln sigma is normal (-1.2, 1.2): a share Phi of draws lies below each sigma, and later is the noisiest share."""
    module = plugins.find("objectives", "edm")
    settings = module.Settings.model_validate(
        {"timestep_bias": {"name": "range", "multiplier": 2, "begin": 200, "end": 500}}
    )
    keys = np.array([[i, 0, 0] for i in range(4000)], dtype=np.int64)
    draws = module.build(settings).draws(3, keys, (1, 1, 1)).tensors
    normal = (draws["s"].double().log() + 1.2) / 1.2
    inside = (normal >= NormalDist().inv_cdf(0.2)) & (normal < NormalDist().inv_cdf(0.5))
    share = 0.3 * 2 / 1.3
    assert inside.double().mean().item() == pytest.approx(share, abs=3 * (share * (1 - share) / 4000) ** 0.5)
    quantile = draws["quantile"].double()
    np.testing.assert_array_equal(inside[1:], ((quantile >= 0.2) & (quantile < 0.5))[1:])
