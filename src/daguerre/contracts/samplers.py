"""The contract of every sampler: its signature, where it ends, at which times it asks, and equal bits."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from daguerre import plugins
from daguerre.contracts import contract
from daguerre.samplers.settings import SamplingSettings, keywords
from daguerre.types import Grid

OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "pure noise": ("v", {"zero_terminal_snr": True}),
    "flow": ("flow", {}),
    "edm": ("edm", {}),
    "cosine": ("x0", {"name": "cosine"}),
    "eps": ("eps", {}),
}
"""Objectives by name, each with settings of its schedule, on whose levels samplers walk."""
GIVEN_BY_DRAW = {"fresh_noise", "level"}


def objective_of(name: str, schedule: dict[str, Any]) -> Any:
    """An objective with these settings of its schedule."""
    module = plugins.find("objectives", name)
    return module.build(module.Settings(schedule=schedule))


def run(name: str, x: Tensor, grid: Grid, denoise: Any = lambda x, t: 0.3 * torch.tanh(x)) -> Any:
    def fresh_noise(step: int) -> Tensor:
        return torch.randn(x.shape, generator=torch.Generator().manual_seed(step)).to(x.dtype)

    own = {"fresh_noise": fresh_noise} if "fresh_noise" in keywords(name) else {}
    return plugins.find("samplers", name).sample(denoise, x, grid, **own)


def noise(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)


class SamplerContract(contract.Contract):
    """A sampler's promises."""

    kind = "samplers"

    def test_signature(self, name: str) -> None:
        parameters = inspect.signature(plugins.find("samplers", name).sample).parameters.values()
        assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == ["denoise", "x_BCHW", "grid"]
        assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty] == [], "need a default"
        assert tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY) == keywords(name)
        assert set(keywords(name)) <= GIVEN_BY_DRAW | set(SamplingSettings.model_fields)
        assert SamplingSettings(sampler=name).sampler == name

    def test_settings_schema_lists_it(self, name: str) -> None:
        assert name in SamplingSettings.model_json_schema()["properties"]["sampler"]["enum"]

    @pytest.mark.parametrize("kind", OBJECTIVES)
    @pytest.mark.parametrize("num_steps", [1, 2, 3, 250])
    def test_finite_from_pure_noise_to_the_clean_end(self, name: str, kind: str, num_steps: int) -> None:
        grid = objective_of(*OBJECTIVES[kind]).grid(num_steps)
        x0 = run(name, grid.prior_std * noise(), grid)
        assert x0.isfinite().all()
        assert x0.shape == (2, 3, 4, 5)

    @pytest.mark.parametrize("kind", OBJECTIVES)
    def test_one_step_is_the_denoised_noise(self, name: str, kind: str) -> None:
        grid = objective_of(*OBJECTIVES[kind]).grid(1)
        torch.testing.assert_close(run(name, noise(), grid), 0.3 * torch.tanh(noise()), rtol=0, atol=1e-7)

    @pytest.mark.parametrize("kind", OBJECTIVES)
    def test_a_denoiser_that_knows_the_image_gets_it(self, name: str, kind: str) -> None:
        grid, image = objective_of(*OBJECTIVES[kind]).grid(9), noise().flip(0)
        x0 = run(name, grid.prior_std * noise(), grid, lambda x, t: image)
        torch.testing.assert_close(x0, image, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("kind", OBJECTIVES)
    def test_the_denoiser_is_called_at_the_grids_times_in_order(self, name: str, kind: str) -> None:
        grid, times = objective_of(*OBJECTIVES[kind]).grid(5), []

        def denoise(x: Tensor, t: float) -> Tensor:
            times.append(t)
            return 0.1 * x

        run(name, grid.prior_std * noise(), grid, denoise)
        assert sorted(times, reverse=True) == times
        assert sorted(set(times), reverse=True) == grid.t_N.tolist()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_dtype_is_kept_and_the_input_is_not_written_to(self, name: str, dtype: torch.dtype) -> None:
        x, grid = noise(dtype), objective_of(*OBJECTIVES["pure noise"]).grid(4)
        before = x.clone()
        assert run(name, x, grid).dtype == dtype
        assert torch.equal(x, before)

    def test_the_same_noise_gives_the_same_bits(self, name: str) -> None:
        grid = objective_of(*OBJECTIVES["flow"]).grid(6)
        assert torch.equal(run(name, noise(), grid), run(name, noise(), grid))
