"""Time laws against closed forms."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from daguerre.objectives.elementwise import normal_quantile
from daguerre.objectives.settings import TimesSettings
from daguerre.objectives.times import law

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
