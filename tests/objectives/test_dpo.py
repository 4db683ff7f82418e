"""Diffusion-DPO against closed forms: ln 2 at the start, the learnt addition on Gaussian data, mass on a mixture."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from quick_cases import chosen
from torch import Tensor, nn

from daguerre.objectives import dpo
from daguerre.objectives.objective import REFERENCE, Example, Nets
from daguerre.samplers import ddim
from daguerre.types import LossTerms

PREDICTIONS = ["eps", "v", "x0", "flow", "edm"]
SHAPE = (3, 1, 1)


def built(name: str = "eps", beta: float = 0.1, **more: Any) -> dpo.Preference:
    return dpo.build(dpo.Settings(beta=beta, diffusion={"name": name, **more}))


def loss_of(made: dpo.Preference, student: Any, reference: Any, pairs: tuple[Tensor, Tensor], draws: Any) -> LossTerms:
    clean = dict(zip(("image", "rejected"), pairs, strict=True))
    return made.loss(Nets(student, {REFERENCE: reference}), Example(clean, {name: {} for name in clean}, draws))


def drawn(made: dpo.Preference, count: int, quantile: float | None = None, shape: tuple[int, ...] = SHAPE) -> Any:
    keys = np.stack([np.arange(count), np.zeros(count), np.zeros(count)], 1).astype(np.int64)
    return made.draws(3, keys, shape, quantile=quantile)


def ranked(reward: Any, count: int, both: Tensor) -> tuple[Tensor, Tensor]:
    """Two sets of samples as pairs, ordered by chance as Bradley and Terry have it."""
    chance = torch.Generator().manual_seed(0)
    wins = torch.rand(count, generator=chance) < torch.sigmoid(reward(both[0]) - reward(both[1]))
    wins = wins.view(-1, 1, 1, 1)
    return torch.where(wins, both[0], both[1]), torch.where(wins, both[1], both[0])


@pytest.mark.parametrize("name", PREDICTIONS)
def test_the_loss_is_ln_2_where_the_student_is_the_reference(name: str) -> None:
    made = built(name)

    def net(x: Tensor, c_noise: Tensor, cond: Any) -> Tensor:
        return x.roll(1, 1) + 1e-3 * c_noise[:, None, None, None]

    terms = loss_of(made, net, net, (torch.randn(5, *SHAPE), torch.randn(5, *SHAPE)), drawn(made, 5))
    assert terms.loss_B.tolist() == [pytest.approx(math.log(2), abs=1e-7)] * 5
    assert terms.metrics["preference_margin"].tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("name", "quantile"),
    chosen(product(PREDICTIONS, [0.2, 0.6]), lambda *each: each in (("eps", 0.6), ("v", 0.2), ("flow", 0.2))),
)
def test_on_gaussian_data_the_noise_moves_against_the_reward_by_one_over_beta(name: str, quantile: float) -> None:
    """Data N(0, I), reward g.x, one noise for both: the noise that is seen moves by -g (a^2 + s^2) / (beta a s)."""
    beta, g = 0.7, torch.tensor([0.8, -0.5, 0.0])
    made, count = built(name, beta), 20_000
    draws = drawn(made, count, quantile)
    a, s, p, q = (getattr(draws, each)[0].double() for each in "aspq")
    d = a * q - s * p

    def reference(x: Tensor, c_noise: Tensor, cond: Any) -> Tensor:
        x_t = x / draws.c_in[0]
        x0 = a * x_t / (a**2 + s**2)
        return (p * x0 + q * (x_t - a * x0) / s).float()

    addition = torch.zeros(3, requires_grad=True)

    def student(x: Tensor, c_noise: Tensor, cond: Any) -> Tensor:
        return reference(x, c_noise, cond) + (d / a).float() * addition.view(1, 3, 1, 1)  # as eps = (a y - p x) / d

    samples = torch.randn(2, count, *SHAPE, generator=torch.Generator().manual_seed(1))
    pairs = ranked(lambda x: x.flatten(1) @ g, count, samples)
    optimizer = torch.optim.LBFGS([addition], line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(made, student, reference, pairs, draws).loss_B.mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    expected = -g * ((a**2 + s**2) / (beta * a * s)).float()
    assert (addition.detach() - expected).norm() < 0.05 * expected.norm()


CENTRE, WIDTH = 2.0, 0.5
"""Of two modes on a line, at both signs."""


def exact(x: Tensor, c_noise: Tensor, cond: Any) -> Tensor:
    """The velocity that a network which knows the two modes sees, on flow's path (1 - t, t)."""
    s = (c_noise / 1000).view(-1, 1, 1, 1)
    a = (1 - s).clamp(min=1e-3)
    variance, sides = (a * WIDTH) ** 2 + s**2, torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1, 1)
    apart = x - sides * a * CENTRE
    eps = ((-(apart**2) / (2 * variance)).softmax(0) * s * apart / variance).sum(0)
    return (eps - x) / a


def mass(beta: float) -> float:
    """The share of samples at the right mode, where pairs mostly prefer it, after 200 updates of a small network that
    is added to the exact one."""
    torch.manual_seed(0)
    made = built("flow", beta)
    addition = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
    nn.init.zeros_(addition[-1].weight)

    def student(x: Tensor, c_noise: Tensor, cond: Any) -> Tensor:
        level = (c_noise / 500 - 1).expand(len(x))
        return exact(x, c_noise, cond) + addition(torch.stack([x.flatten(), level], 1)).view_as(x)

    count = 200 * 64
    sides = torch.randint(0, 2, (2, count, 1, 1, 1)) * 2 - 1
    better, worse = ranked(lambda x: 1.5 * x.flatten().sign(), count, sides * CENTRE + WIDTH * torch.randn(sides.shape))
    whole = drawn(made, count, shape=(1, 1, 1))
    optimizer = torch.optim.Adam(addition.parameters(), 1e-2)
    for start in range(0, count, 64):
        rows = slice(start, start + 64)
        draws = whole.of({name: value[rows] for name, value in whole.tensors.items()})
        loss = loss_of(made, student, exact, (better[rows], worse[rows]), draws).loss_B.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        start = torch.randn(2000, 1, 1, 1, generator=torch.Generator().manual_seed(1))
        made_x0 = ddim.sample(lambda x, t: made.inner.denoise(student, x, t, {}), start, made.inner.grid(20))
    return float((made_x0 > 0).float().mean())


@pytest.mark.long  # of the quick tests, the noise moves by one over beta
def test_less_beta_moves_more_mass_to_the_preferred_mode() -> None:
    found = [mass(beta) for beta in (8.0, 2.0, 0.5)]
    assert 0.5 < found[0] < found[1] - 0.02 < found[2] - 0.04, found
