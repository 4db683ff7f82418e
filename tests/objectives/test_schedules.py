"""Schedules against closed forms: sigma table, zero terminal SNR, shift, cosine clamps, EDM's grid."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from daguerre.objectives.levels import schedules
from daguerre.objectives.settings import ScheduleSettings


def schedule(name: str = "scaled_linear", **values) -> schedules.Schedule:
    return schedules.build(ScheduleSettings(name=name, **values))


def log_snr(made: schedules.Schedule, t: torch.Tensor | list[float]) -> np.ndarray:
    a, s = made.path(torch.as_tensor(t, dtype=torch.float64))
    return 2 * (a / s).log().numpy()


def test_sigma_table_of_stable_diffusion():
    t = torch.tensor([0, 1, 10, 100, 250, 500, 750, 999], dtype=torch.float64)
    a, s = schedule().path(t)
    expected = [0.02916716, 0.04131441, 0.09829107, 0.34393123, 0.69579894, 1.61827883, 4.09916405, 14.61464123]
    np.testing.assert_allclose((s / a).numpy(), expected, rtol=0, atol=5e-9)
    np.testing.assert_allclose((a**2 + s**2).numpy(), 1, rtol=1e-15)


def test_where_snr_falls_below_five_and_one():
    a, s = schedule().path(torch.arange(1000, dtype=torch.float64))
    snr = (a / s) ** 2
    assert int((snr < 5).nonzero()[0]) == 147
    assert int((snr < 1).nonzero()[0]) == 354


def test_zero_terminal_snr_keeps_the_first_and_zeroes_the_last():
    t = torch.tensor([0, 998, 999], dtype=torch.float64)
    a, s = schedule(zero_terminal_snr=True).path(t)
    plain, _ = schedule().path(t)
    assert a[0] == pytest.approx(plain[0].item(), rel=1e-14)
    assert a[2] == 0
    assert s[2] == 1
    assert 0 < a[1] < plain[1]


def test_between_timesteps_sigma_is_a_straight_line():
    a, s = schedule().path(torch.tensor([10.0, 10.25, 11.0], dtype=torch.float64))
    low, between, high = (s / a).tolist()
    assert between == pytest.approx(0.75 * low + 0.25 * high, rel=1e-14)


def test_between_the_last_timesteps_of_zero_terminal_snr_is_pure_noise():
    a, s = schedule(zero_terminal_snr=True).path(torch.tensor(998.5, dtype=torch.float64))
    assert (a.item(), s.item()) == (0, 1)


@pytest.mark.parametrize("name", ["scaled_linear", "cosine", "linear_flow"])
def test_shift_multiplies_the_noise_to_signal_ratio(name: str):
    drawn = torch.tensor([0.001, 0.2, 0.5, 0.9], dtype=torch.float64)
    plain, shifted = schedule(name), schedule(name, shift=3.0)
    difference = log_snr(shifted, shifted.time(drawn)) - log_snr(plain, plain.time(drawn))
    np.testing.assert_allclose(difference, -2 * math.log(3), rtol=1e-11)


def test_shift_of_the_flow_moves_its_times():
    t = schedule("linear_flow", shift=3.0).time(torch.tensor([0, 0.25, 0.5, 1], dtype=torch.float64))
    np.testing.assert_allclose(t.numpy(), [0, 0.5, 0.75, 1], rtol=1e-15)


def test_cosine_is_clamped_as_in_cascade():
    ends = log_snr(schedule("cosine"), [0.0, 1.0])
    np.testing.assert_allclose(ends, [math.log(0.9999 / 1e-4), math.log(1e-4 / 0.9999)], rtol=1e-12)
    np.testing.assert_allclose(ends, [9.2102, -9.2102], atol=5e-5)
    t, first = 0.4, math.cos(0.008 / 1.008 * math.pi / 2)
    a, _ = schedule("cosine").path(torch.tensor(t, dtype=torch.float64))
    assert a.item() == pytest.approx(math.cos((0.008 + t) / 1.008 * math.pi / 2) / first, rel=1e-14)


def test_a_shifted_cosine_is_clamped_again_as_in_cascade():
    made = schedule("cosine", shift=2.0)
    np.testing.assert_allclose(log_snr(made, [0.0, 0.999, 1.0])[1:], -9.2102, atol=5e-5)
    plain, t = schedule("cosine"), [0.0, 0.3, 0.9]
    np.testing.assert_allclose(log_snr(made, t), log_snr(plain, t) - 2 * math.log(2), rtol=1e-12)


def test_edm_grid_of_ten_steps():
    expected = [80, 42.4152, 21.1087, 9.72320, 4.06612, 1.50174, 0.469979, 0.116639, 0.0204353, 0.002]
    np.testing.assert_allclose(schedule("edm").stops(10, "trailing").numpy(), expected, rtol=5e-6)


def test_edm_grid_follows_its_settings():
    stops = schedule("edm", sigma_min=0.1, sigma_max=10.0, rho=1.0).stops(3, "trailing")
    np.testing.assert_allclose(stops.numpy(), [10, 5.05, 0.1], rtol=1e-14)


@pytest.mark.parametrize("name", ["scaled_linear", "cosine", "linear_flow", "edm"])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_the_time_of_a_level_is_the_time_that_has_it(name: str, shift: float):
    made = schedule(name, **({} if name == "edm" else {"shift": shift}))
    t = made.time(torch.linspace(0.01, 0.98, 777, dtype=torch.float64))
    np.testing.assert_allclose(made.time_of(*made.path(t)).numpy(), t.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("zero_terminal_snr", [False, True])
def test_each_timestep_is_found_again_to_the_bit(zero_terminal_snr: bool):
    made, t = schedule(zero_terminal_snr=zero_terminal_snr), torch.arange(1000, dtype=torch.float64)
    assert torch.equal(made.time_of(*made.path(t)), t)


def test_levels_beyond_a_table_have_the_time_of_its_end():
    made, ones = schedule(), torch.ones(3, dtype=torch.float64)
    assert made.time_of(ones, torch.tensor([1e-4, 50.0, torch.inf], dtype=torch.float64)).tolist() == [0, 999, 999]
    zero = schedule(zero_terminal_snr=True)
    a, s = zero.path(torch.tensor([998.0, 999.0], dtype=torch.float64))
    assert zero.time_of(torch.cat([a / 10, a]), torch.cat([s, s])).tolist() == [998, 999, 998, 999]


def test_continuous_stops_are_even_from_pure_noise():
    np.testing.assert_allclose(schedule("cosine").stops(4, "trailing").numpy(), [1, 0.75, 0.5, 0.25])
    np.testing.assert_allclose(schedule("linear_flow", shift=3.0).stops(2, "trailing").numpy(), [1, 0.75])


@pytest.mark.parametrize(
    ("values", "num_steps", "spacing", "fix"),
    [
        ({}, 1001, "trailing", "1 to 1000"),
        ({}, 0, "trailing", "1 to 1000"),
        ({}, 1, "linspace", "use trailing"),
        ({}, 1000, "leading", "at most 999"),
        ({"zero_terminal_snr": True}, 10, "leading", "use trailing"),
        ({"name": "cosine"}, 10, "leading", "leave it at trailing"),
        ({"name": "edm"}, 10, "linspace", "leave it at trailing"),
        ({"name": "linear_flow"}, 0, "trailing", "at least 1"),
    ],
)
def test_stops_that_make_no_sense_are_refused_with_the_way_out(values, num_steps, spacing, fix):
    with pytest.raises(ValueError, match=fix):
        schedule(**values).stops(num_steps, spacing)
