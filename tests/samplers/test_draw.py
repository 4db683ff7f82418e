"""Images from seeds: what an image depends on, and what it does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from schedulers import objective_of
from torch import Tensor

from daguerre import keys, plugins
from daguerre.samplers import ddim
from daguerre.samplers.draw import draw, initial_noise
from daguerre.samplers.settings import SamplingSettings, keywords
from daguerre.types import Cond

SHAPE = (4, 4, 4)


class Seen:
    """A network that remembers the first x of every batch."""

    def __init__(self) -> None:
        self.first: dict[float, list[Tensor]] = {}

    def __call__(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> Tensor:
        self.first.setdefault(float(c_noise_B[0]), []).append(x_BCHW)
        return torch.tanh(x_BCHW + cond["text"].reshape(-1, 1, 1, 1))


def images(seeds: list[int], net: Any, at_once: int = 8, **settings: Any) -> Tensor:
    batches = [seeds[i : i + at_once] for i in range(0, max(1, len(seeds)), at_once)]
    sampling = SamplingSettings(num_inference_steps=5, **settings)

    def drawn(batch: list[int]) -> Tensor:
        cond = {"text": torch.tensor([[0.01 * seed] for seed in batch]).reshape(len(batch), 1)}
        null = {"text": torch.zeros(len(batch), 1)}
        return draw(objective_of("v", zero_terminal_snr=True), net, cond, null, SHAPE, batch, sampling)

    return torch.cat([drawn(batch) for batch in batches])


def test_the_noise_of_an_image_is_a_function_of_its_seed_alone() -> None:
    noise = initial_noise([5, 2**40, 5], SHAPE)
    assert noise.dtype == torch.float32
    assert torch.equal(noise[0], noise[2])
    for row, seed in zip(noise, (5, 2**40), strict=False):
        expected = keys.normals(seed, "sample", 0, count=int(np.prod(SHAPE))).reshape(SHAPE)
        assert torch.equal(row, torch.from_numpy(expected))


OWN: list[tuple[str, dict[str, float]]] = [(name, {}) for name in plugins.names("samplers")]
OWN += [("ddim", {"eta": 1.0}), ("heun", {"s_churn": 3.0})]


@pytest.mark.parametrize(("sampler", "own"), OWN, ids=str)
def test_images_do_not_depend_on_the_batch(sampler: str, own: dict[str, float]) -> None:
    seeds = [3, 14, 15, 92, 65]
    together, by_two = Seen(), Seen()
    all_at_once = images(seeds, together, sampler=sampler, **own, at_once=8)
    in_pairs = images(seeds, by_two, sampler=sampler, **own, at_once=2)
    reversed_ = images(seeds[::-1], Seen(), sampler=sampler, **own, at_once=3).flip(0)

    assert [len(x) // 2 for x in by_two.first[999.0]] == [2, 2, 1]  # both sides of guidance in one batch
    starts = torch.cat([x[len(x) // 2 :] for x in by_two.first[999.0]])
    assert torch.equal(starts, together.first[999.0][0][len(seeds) :])
    assert torch.equal(starts, initial_noise(seeds, SHAPE))
    torch.testing.assert_close(all_at_once, in_pairs, rtol=0, atol=1e-5)
    torch.testing.assert_close(all_at_once, reversed_, rtol=0, atol=1e-5)


def test_eta_draws_fresh_noise_by_seed_and_step() -> None:
    seeds, net = [3, 2**33], Seen()
    objective, cond = objective_of("v", zero_terminal_snr=True), {"text": torch.ones(2, 1)}
    settings = SamplingSettings(num_inference_steps=5, guidance_scale=1, eta=1.0)

    def fresh_noise(step: int) -> Tensor:
        rows = [keys.normals(seed, "sample/fresh", step, count=64) for seed in seeds]
        return torch.from_numpy(np.stack(rows)).reshape(2, *SHAPE)

    expected = ddim.sample(
        lambda x, t: objective.denoise(net, x, t, cond),
        initial_noise(seeds, SHAPE),
        objective.grid(5),
        eta=1.0,
        fresh_noise=fresh_noise,
    )
    assert torch.equal(draw(objective, net, cond, None, SHAPE, seeds, settings), expected)


def test_churn_draws_fresh_noise_by_seed_and_step_at_levels_between() -> None:
    seeds, told = [3, 2**33], Seen()
    objective, cond = objective_of("edm"), {"text": torch.ones(2, 1)}
    settings = SamplingSettings(num_inference_steps=5, guidance_scale=1, sampler="heun", s_churn=1.0, s_tmax=10)
    drawn = draw(objective, told, cond, None, SHAPE, seeds, settings)
    sigma = objective.grid(5).t_N
    hat = torch.where(sigma > 10, sigma, sigma * 1.2)
    levels = {f"{value:.4f}" for value in (torch.cat([sigma, hat]).log() / 4).tolist()}
    assert {f"{value:.4f}" for value in told.first} == levels
    again = draw(objective, Seen(), cond, None, SHAPE, seeds, settings)
    assert torch.equal(drawn, again)
    fewer = draw(objective, Seen(), {"text": torch.ones(1, 1)}, None, SHAPE, seeds[1:], settings)
    torch.testing.assert_close(fewer, drawn[1:], rtol=0, atol=1e-5)


def test_edm_starts_from_noise_of_its_own_level() -> None:
    net = Seen()
    settings = SamplingSettings(num_inference_steps=3, guidance_scale=1)
    objective = objective_of("edm")
    draw(objective, net, {"text": torch.zeros(2, 1)}, None, SHAPE, [0, 1], settings)
    start = next(iter(net.first.values()))[0]
    torch.testing.assert_close(start, 80 / (80**2 + 0.25) ** 0.5 * initial_noise([0, 1], SHAPE))


def test_no_seeds_no_images() -> None:
    assert images([], Seen()).shape == (0, *SHAPE)


def test_drawing_keeps_no_graph() -> None:
    weight = torch.nn.Parameter(torch.ones(()))
    x0 = images([1], lambda x, c_noise, cond: weight * x)
    assert not x0.requires_grad


def test_settings_refuse_what_would_have_no_effect() -> None:
    for name in plugins.names("samplers"):
        for own, taken_by in (("eta", "ddim"), ("s_churn", "heun")):
            if own in keywords(name):
                assert getattr(SamplingSettings(sampler=name, **{own: 0.5}), own) == 0.5
            else:
                with pytest.raises(
                    ValueError, match=f"{own} is 0.5 but {name} does not use it: set {own}=0, or sampler={taken_by}"
                ):
                    SamplingSettings(sampler=name, **{own: 0.5})
    with pytest.raises(ValueError, match="s_tmin: no effect while s_churn is 0: remove it; s_noise: no effect"):
        SamplingSettings(sampler="heun", s_tmin=0.1, s_noise=1.1)
    with pytest.raises(ValueError, match="s_tmin is 5 and s_tmax is 2"):
        SamplingSettings(sampler="heun", s_churn=1, s_tmin=5, s_tmax=2)
    with pytest.raises(ValueError, match=r"there is no 'dpm_2m' in samplers.*Did you mean 'dpmpp_2m'"):
        SamplingSettings(sampler="dpm_2m")


def test_a_resolved_config_is_accepted_again() -> None:
    for own in ({}, {"s_churn": 40.0, "s_tmax": 50.0}):
        settings = SamplingSettings(sampler="heun", guidance_scale=1, **own)
        assert SamplingSettings(**settings.model_dump()) == settings
