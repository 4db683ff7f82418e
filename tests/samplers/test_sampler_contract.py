"""What every sampler must do, whichever files the folder holds."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import pytest
import torch
from schedulers import objective_of
from torch import Tensor

from daguerre import plugins
from daguerre.samplers.settings import SCHEDULERS, SamplingSettings, keywords
from daguerre.types import Grid

OBJECTIVES = {
    "pure noise": objective_of("v", zero_terminal_snr=True),
    "flow": objective_of("flow"),
    "edm": objective_of("edm"),
    "cosine": objective_of("x0", name="cosine"),
    "eps": objective_of("eps"),
}
each_sampler = pytest.mark.parametrize("name", plugins.names("samplers"))
each_grid = pytest.mark.parametrize("kind", OBJECTIVES)


GIVEN_BY_DRAW = {"fresh_noise", "level"}


def run(name: str, x: Tensor, grid: Grid, denoise: Any = lambda x, t: 0.3 * torch.tanh(x)) -> Tensor:
    def fresh_noise(step: int) -> Tensor:
        return torch.randn(x.shape, generator=torch.Generator().manual_seed(step)).to(x.dtype)

    own = {"fresh_noise": fresh_noise} if "fresh_noise" in keywords(name) else {}
    return plugins.find("samplers", name).sample(denoise, x, grid, **own)


def noise(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)


@each_sampler
def test_signature(name: str) -> None:
    parameters = inspect.signature(plugins.find("samplers", name).sample).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == ["denoise", "x_BCHW", "grid"]
    assert all(p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY)
    assert tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY) == keywords(name)
    assert set(keywords(name)) <= GIVEN_BY_DRAW | set(SamplingSettings.model_fields)
    assert SamplingSettings(sampler=name).sampler == name


def test_schedulers_of_configs_are_samplers_here() -> None:
    assert set(SCHEDULERS.values()) <= set(plugins.names("samplers"))
    assert {"EulerAncestralDiscreteScheduler", "UniPCMultistepScheduler", "LCMScheduler"} <= set(SCHEDULERS)
    assert all(hasattr(diffusers, name) for name in SCHEDULERS)


@each_sampler
def test_settings_schema_lists_it(name: str) -> None:
    assert name in SamplingSettings.model_json_schema()["properties"]["sampler"]["enum"]


@each_grid
@each_sampler
@pytest.mark.parametrize("num_steps", [1, 2, 3, 250])
def test_finite_from_pure_noise_to_the_clean_end(name: str, kind: str, num_steps: int) -> None:
    grid = OBJECTIVES[kind].grid(num_steps)
    x0 = run(name, grid.prior_std * noise(), grid)
    assert x0.isfinite().all()
    assert x0.shape == (2, 3, 4, 5)


@each_grid
@each_sampler
def test_one_step_is_the_denoised_noise(name: str, kind: str) -> None:
    grid = OBJECTIVES[kind].grid(1)
    torch.testing.assert_close(run(name, noise(), grid), 0.3 * torch.tanh(noise()), rtol=0, atol=1e-7)


@each_grid
@each_sampler
def test_a_denoiser_that_knows_the_image_gets_it(name: str, kind: str) -> None:
    grid, image = OBJECTIVES[kind].grid(9), noise().flip(0)
    x0 = run(name, grid.prior_std * noise(), grid, lambda x, t: image)
    torch.testing.assert_close(x0, image, rtol=0, atol=1e-5)


@each_grid
@each_sampler
def test_the_denoiser_is_called_at_the_grids_times_in_order(name: str, kind: str) -> None:
    grid, times = OBJECTIVES[kind].grid(5), []

    def denoise(x: Tensor, t: float) -> Tensor:
        times.append(t)
        return 0.1 * x

    run(name, grid.prior_std * noise(), grid, denoise)
    assert sorted(times, reverse=True) == times
    assert sorted(set(times), reverse=True) == grid.t_N.tolist()


@each_sampler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept_and_the_input_is_not_written_to(name: str, dtype: torch.dtype) -> None:
    x, grid = noise(dtype), OBJECTIVES["pure noise"].grid(4)
    before = x.clone()
    assert run(name, x, grid).dtype == dtype
    assert torch.equal(x, before)


@each_sampler
def test_the_same_noise_gives_the_same_bits(name: str) -> None:
    grid = OBJECTIVES["flow"].grid(6)
    assert torch.equal(run(name, noise(), grid), run(name, noise(), grid))
