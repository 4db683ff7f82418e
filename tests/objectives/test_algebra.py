"""The one algebra: its table of scalings, its inverse, the loss of an ideal network, and what grids hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from losses import loss_of

from daguerre import plugins
from daguerre.objectives.algebra import Diffusion
from daguerre.objectives.levels.schedules import from_sigma
from daguerre.objectives.settings import DiffusionSettings

SIGMA = torch.tensor([0.01, 0.3, 0.5, 1.0, 14.6, 80.0], dtype=torch.float64)
DIFFUSION = [
    name
    for name in plugins.names("objectives")
    if issubclass(plugins.find("objectives", name).Settings, DiffusionSettings)
]


def built(name: str, **values) -> Diffusion:
    module = plugins.find("objectives", name)
    return module.build(module.Settings(**values))


def scalings(objective: Diffusion, sigma: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """c_skip, c_out, c_in in the variance-exploding frame, read off the solve: D(x) = c_skip x + c_out F(c_in x)."""
    a, s = (torch.ones_like(sigma), sigma) if objective.settings.name == "edm" else from_sigma(sigma)
    one, zero = torch.ones(len(sigma), 1, 1, 1).double(), torch.zeros(len(sigma), 1, 1, 1).double()
    in_frame = a.reshape(-1, 1, 1, 1) * one  # x_t = a x_exploding
    c_skip, _ = objective.solve(in_frame, zero, a, s)
    c_out, _ = objective.solve(zero, one, a, s)
    return c_skip.flatten(), c_out.flatten(), a * objective.input_scale(a, s)


EXPECTED = {
    "eps": lambda s: (torch.ones_like(s), -s, (s**2 + 1) ** -0.5, s**-2),
    "v": lambda s: (1 / (s**2 + 1), -s / (s**2 + 1) ** 0.5, (s**2 + 1) ** -0.5, (s**2 + 1) / s**2),
    "edm": lambda s: (
        0.25 / (s**2 + 0.25),
        s * 0.5 / (s**2 + 0.25) ** 0.5,
        (s**2 + 0.25) ** -0.5,
        (s**2 + 0.25) / (s * 0.5) ** 2,
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_scalings_follow_from_the_one_algebra(name: str):
    c_skip, c_out, c_in = scalings(built(name), SIGMA)
    *expected, paired_weight = EXPECTED[name](SIGMA)
    for got, wanted in zip((c_skip, c_out, c_in), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12)
    np.testing.assert_allclose(paired_weight * c_out**2, 1, rtol=1e-12)


@pytest.mark.parametrize(
    ("sigma", "expected"),
    [(0.5, (0.5, 0.3535534, 1.4142136, -0.1732868)), (80.0, (3.9061e-5, 0.4999902, 0.0124998, 1.0955067))],
)
def test_edm_scaling_numbers(sigma: float, expected: tuple[float, ...]):
    objective, at = built("edm"), torch.tensor([sigma], dtype=torch.float64)
    got = [*(c.item() for c in scalings(objective, at)), objective.c_noise(at).item()]
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_edm_of_unit_data_is_v_with_the_sign_flipped():
    of_edm, of_v = scalings(built("edm", sigma_data=1.0), SIGMA), scalings(built("v"), SIGMA)
    for edm, v, sign in zip(of_edm, of_v, (1, -1, 1), strict=True):
        np.testing.assert_allclose(edm, sign * v, rtol=1e-12)


@pytest.mark.parametrize("name", DIFFUSION)
@given(quantile=st.floats(0, 1 - 2.0**-53), seed=st.integers(0, 2**32 - 1))
def test_solve_inverts_path_and_target(name: str, quantile: float, seed: int):
    objective = built(name)
    x0, eps = torch.randn(2, 1, 2, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    a, s = objective.path(objective.times(torch.tensor(quantile, dtype=torch.float64)))
    p, q = objective.target(a, s)
    got_x0, got_eps = objective.solve(a * x0 + s * eps, p * x0 + q * eps, a, s)
    torch.testing.assert_close(got_x0, x0, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got_eps, eps, rtol=1e-9, atol=1e-9)


def test_v_with_zero_terminal_snr_is_inverted_where_all_is_noise():
    objective = built("v", schedule={"zero_terminal_snr": True})
    a, s = objective.path(torch.tensor(999.0, dtype=torch.float64))
    x0, eps = torch.randn(2, 1, 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p, q = objective.target(a, s)
    got = objective.solve(a * x0 + s * eps, p * x0 + q * eps, a, s)
    torch.testing.assert_close(got, (x0, eps), rtol=0, atol=0)


def ideal(objective: Diffusion, mean: float, std: float):
    """A network that returns E[y | x_t] for data N(mean, std^2): the posterior mean of x0, mapped to y."""
    told = {}

    def net(x: torch.Tensor, c_noise: torch.Tensor, cond) -> torch.Tensor:
        a, s, p, q, c_in = (told[name].double().reshape(-1, 1, 1, 1) for name in ("a", "s", "p", "q", "c_in"))
        x_t = x / c_in
        x0 = mean + a * std**2 / (a**2 * std**2 + s**2) * (x_t - a * mean)
        return p * x0 + q * (x_t - a * x0) / s

    return net, told


@pytest.mark.parametrize("weighting", ["none", "min_snr", "p2"])
@pytest.mark.parametrize("name", DIFFUSION)
@pytest.mark.parametrize("quantile", [0.05, 0.4, 0.8])
def test_ideal_network_has_the_analytic_loss(name: str, weighting: str, quantile: float):
    mean, std, count = 0.3, 0.7, 64
    objective = built(name, weighting={"name": weighting})
    keys = np.array([[i, 0, 0] for i in range(count)], dtype=np.int64)
    draws = objective.draws(11, keys, (4, 16, 16), quantile=quantile).tensors
    x0 = mean + std * torch.randn(count, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    net, told = ideal(objective, mean, std)
    told.update(draws)
    got = loss_of(objective, net, x0, {}, draws).loss_B.mean().item()
    a, s = objective.path(objective.times(torch.tensor(quantile, dtype=torch.float64)))
    p, q = objective.target(a, s)
    d = a * q - s * p
    x0_variance = std**2 * s**2 / (a**2 * std**2 + s**2)
    expected = (objective.weight(a, s) * (d / s) ** 2 * x0_variance).item()
    assert got == pytest.approx(expected, rel=4 * math.sqrt(2 / x0.numel()))


def test_denoise_is_the_ideal_x0_for_scalar_and_batched_times(objective: Diffusion):
    t = objective.times(torch.tensor([0.6, 0.6], dtype=torch.float64))
    a, s = objective.path(t)
    p, q = objective.target(a, s)
    net, told = ideal(objective, 0.3, 0.7)
    told.update(a=a, s=s, p=p, q=q, c_in=objective.input_scale(a, s))
    x_t = torch.randn(2, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = 0.3 + (a * 0.49 / (a**2 * 0.49 + s**2)).reshape(-1, 1, 1, 1) * (x_t - a.reshape(-1, 1, 1, 1) * 0.3)
    for time in (float(t[0]), t[0], t):
        torch.testing.assert_close(objective.denoise(net, x_t, time, {}), expected, rtol=1e-9, atol=1e-9)


def test_denoise_tells_each_sample_its_noise_level(objective: Diffusion):
    told = []

    def net(x: torch.Tensor, c_noise: torch.Tensor, cond) -> torch.Tensor:
        told.append(c_noise)
        return x.bfloat16()

    t = objective.times(torch.tensor(0.5, dtype=torch.float64))
    x0 = objective.denoise(net, torch.ones(3, 1, 2, 2), float(t), {})
    assert x0.dtype == torch.float32
    assert told[0].shape == (3,)
    assert told[0].dtype == torch.float32
    assert told[0][0] == objective.c_noise(t).float()


def test_a_grid_ends_clean_and_starts_from_the_prior(objective: Diffusion):
    grid = objective.grid(7)
    assert len(grid.t_N) == 7
    assert len(grid.a) == len(grid.s) == len(grid.frame) == 8
    assert (float(grid.a[-1]), float(grid.s[-1]), float(grid.frame[-1])) == (1, 0, 1)
    ratio = grid.s / grid.a
    assert (ratio.diff() < 0).all()
    a, s = objective.path(grid.t_N)
    torch.testing.assert_close((grid.a[:-1], grid.s[:-1]), (a, s), rtol=0, atol=0)
    assert grid.prior_std == pytest.approx(math.hypot(a[0], s[0]), rel=1e-4)


def test_frame_of_variance_preserving_grids_is_the_signal_but_never_zero():
    grid = built("v", schedule={"zero_terminal_snr": True}).grid(4)
    assert grid.a[0] == 0
    assert grid.frame.tolist() == [1.0, *grid.a[1:].tolist()]
    assert (built("flow").grid(4).frame == 1).all()
    assert (built("edm").grid(4).frame == 1).all()
    assert built("edm").grid(4).prior_std == 80
