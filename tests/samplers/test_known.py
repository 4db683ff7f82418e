"""Image-to-image and inpainting below images: where sampling starts, which steps run, what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mixture import THREE, even_normals, network
from quick_cases import chosen
from schedulers import STOCHASTIC, objective_of
from test_mixture import FRESH_NOISE, VARIANTS, errors
from torch import Tensor

from daguerre import plugins
from daguerre.objectives.algebra import Diffusion
from daguerre.samplers.draw import draw, initial_noise
from daguerre.samplers.known import Known, steps_run
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Cond

COUNT = 1024
SEEDS = range(COUNT)
SAMPLERS: list[tuple[str, dict[str, float]]] = [(name, {}) for name in plugins.names("samplers")]
SAMPLERS += [("ddim", {"eta": 1.0}), ("heun", {"s_churn": 20.0})]


def mixture() -> Tensor:
    """Samples [COUNT, 2, 1, 1] of the mixture, spread evenly over it."""
    component = torch.searchsorted(THREE.weight_K.cumsum(0), (torch.arange(COUNT, dtype=torch.float64) + 0.5) / COUNT)
    normal = even_normals(COUNT, seed=2).double().reshape(COUNT, 2)
    spread = torch.einsum("bij,bj->bi", torch.linalg.cholesky(THREE.cov_K22)[component], normal)
    return (THREE.mean_K2[component] + spread).float().reshape(COUNT, 2, 1, 1)


def drawn(objective: Diffusion, known: Known | None, steps: int, net: Any = None, **settings: Any) -> Tensor:
    sampling = SamplingSettings(num_inference_steps=steps, guidance_scale=1, **settings)
    net = net or network(objective, THREE.denoise)
    return draw(objective, net, {}, None, (2, 1, 1), SEEDS, sampling, known=known)


def test_the_steps_that_run_are_counted_as_diffusers_counts_them():
    assert [steps_run(50, share) for share in (1.0, 0.999, 0.6, 0.58, 0.02, 0.019)] == [50, 49, 30, 28, 1, 0]


OF_EACH_SCHEDULE = chosen(VARIANTS, lambda name, schedule: (name, schedule) in (VARIANTS[0], ("v", {}), ("flow", {})))


@pytest.mark.parametrize(("name", "schedule"), OF_EACH_SCHEDULE, ids=str)
def test_samples_of_the_mixture_become_samples_of_the_mixture(name: str, schedule: dict[str, Any]) -> None:
    """With a perfect denoiser, from the level of the middle step: noise of another level would change the spread."""
    steps = 400 if schedule.get("shift") == 2.0 else 200  # the last of even steps, to the mean, is at sigma .05
    error = errors(drawn(objective_of(name, **schedule), Known(mixture(), 0.5), steps, sampler="dpmpp_2m"))
    assert all(error[what] <= FRESH_NOISE[what] for what in FRESH_NOISE), error


FIRST_ORDER = ("ddim", "euler", "euler_ancestral")
SLOW = [pytest.mark.long]
"""Fresh noise of a thousand seeds in each step."""


@pytest.mark.parametrize(
    ("sampler", "own"),
    [
        pytest.param(sampler, own, marks=SLOW if own or sampler in STOCHASTIC else [])
        for sampler, own in SAMPLERS
        if sampler != "lcm"  # which takes no denoiser
    ],
    ids=str,
)
def test_every_sampler_goes_on_from_a_level(sampler: str, own: dict[str, float]) -> None:
    steps = 128 if sampler in FIRST_ORDER else 40
    x0 = drawn(objective_of("edm"), Known(mixture(), 0.5), steps, sampler=sampler, **own)
    error = errors(x0)
    assert all(error[what] <= FRESH_NOISE[what] for what in FRESH_NOISE), error
    assert (THREE.component(x0) == THREE.component(mixture())).double().mean() < 0.9, "sigma 2.5 leaves hardly a trace"


@pytest.mark.parametrize(("name", "schedule"), OF_EACH_SCHEDULE, ids=str)
def test_little_strength_gives_the_sample_back(name: str, schedule: dict[str, Any]) -> None:
    objective = objective_of(name, **schedule)
    x0 = drawn(objective, Known(mixture(), 1 / 500), 500, sampler="heun")
    sigma = objective.grid(500).s[-2].item()
    print(name, schedule, sigma)
    assert sigma < 0.1
    assert (x0 - mixture()).abs().max() < 4 * sigma


class Seen:
    """A network that notes what it is shown, and answers with a number that depends on all of it."""

    def __init__(self) -> None:
        self.x: list[Tensor] = []

    def __call__(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> Tensor:
        self.x.append(x_BCHW)
        return torch.tanh(x_BCHW + x_BCHW.mean((1, 2, 3), keepdim=True))


SHAPE = (4, 6, 6)
KNOWN = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0))
ANEW = torch.zeros(3, 1, 6, 6, dtype=torch.bool)
ANEW[:, :, 2:5, 1:4] = True


def around(objective: Diffusion, known: Known, sampler: str, **own: Any) -> tuple[Tensor, Seen]:
    net, sampling = Seen(), SamplingSettings(num_inference_steps=8, guidance_scale=1, sampler=sampler, **own)
    return draw(objective, net, {}, None, SHAPE, [5, 6, 7], sampling, known=known), net


@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize(("sampler", "own"), SAMPLERS, ids=str)
@pytest.mark.parametrize("name", ["v", "flow"])
def test_what_is_kept_is_equal_to_the_bit_and_seen_with_its_noise(
    name: str, sampler: str, own: dict[str, float], strength: float
) -> None:
    objective = objective_of(name)
    x0, net = around(objective, Known(KNOWN, strength, ANEW), sampler, **own)
    kept = ~ANEW.expand_as(KNOWN)
    assert torch.equal(x0[kept], KNOWN[kept])
    assert not torch.equal(x0[~kept], KNOWN[~kept])
    steps = int(8 * strength)
    assert len(net.x) == (2 * steps - 1 if sampler == "heun" else steps)
    grid = objective.grid(8).last(steps)
    last = grid.a[-2].item() * KNOWN + grid.s[-2].item() * initial_noise([5, 6, 7], SHAPE)
    if not own.get("s_churn"):  # which sees other levels
        torch.testing.assert_close(net.x[-1][kept], last[kept])
        assert torch.equal(net.x[0], initial_noise([5, 6, 7], SHAPE)) == (strength == 1)
    other, _ = around(objective, Known(torch.where(ANEW, KNOWN, KNOWN + 1), strength, ANEW), sampler, **own)
    assert not torch.equal(other[~kept], x0[~kept]), "what is painted depends on what is around it"


def test_a_mask_of_everything_is_no_mask():
    objective = objective_of("v")
    whole, _ = around(objective, Known(KNOWN, 0.5, torch.ones_like(ANEW)), "dpmpp_2m")
    assert torch.equal(whole, around(objective, Known(KNOWN, 0.5), "dpmpp_2m")[0])


def test_a_shift_moves_the_level_too():
    objective, settings = objective_of("v"), SamplingSettings(num_inference_steps=8, guidance_scale=1, shift=2.0)
    net = Seen()
    draw(objective, net, {}, None, SHAPE, [5, 6, 7], settings, known=Known(KNOWN, 0.5))
    shifted = objective.at(SHAPE, settings)
    grid = shifted.grid(8)
    expected = grid.a[4].item() * KNOWN + grid.s[4].item() * initial_noise([5, 6, 7], SHAPE)
    assert torch.equal(net.x[0], expected)
    assert not torch.equal(expected, around(objective, Known(KNOWN, 0.5), "ddim")[1].x[0])
