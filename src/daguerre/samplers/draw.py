"""Images from seeds: initial noise, guidance, sampler, for one batch.

Holds neither steps nor noise levels nor networks. Image i is a function of its own seed and conditioning;
what else is in its batch changes nothing but rounding.
Letters: B samples, C channels, h and w latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from daguerre import keys, plugins
from daguerre.samplers.guidance import CLASSIFIER_FREE, Guidance
from daguerre.samplers.known import Known
from daguerre.samplers.settings import SamplingSettings, keywords
from daguerre.types import Cond, Grid

Net = Callable[[Tensor, Tensor, Cond], Tensor]
"""net(x_BCHW, c_noise_B, cond) -> y_BCHW."""


class Denoising(Protocol):
    """The part of an objective that sampling calls: where to call the network, and what its answer means."""

    def at(self, shape: tuple[int, ...], sampling: SamplingSettings) -> Denoising:
        """The same on the noise levels that this sampling visits for samples of this shape (C, h, w)."""

    def grid(self, num_steps: int, spacing: str | list[float]) -> Grid:
        """Noise levels of `num_steps` steps."""

    def path(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(a, s) at time t float64."""

    def level(self, sigma: float) -> tuple[float, float, float]:
        """(t, a, s) where s/a is `sigma`."""

    def c_noise(self, t: Tensor) -> Tensor:
        """The network's input for the noise level at time t float64."""

    def predict(self, net: Net, x_BCHW: Tensor, t: float, cond: Cond) -> Tensor:
        """The network's prediction y [B, C, h, w] for x at time t."""

    def solve(self, x_BCHW: Tensor, y_BCHW: Tensor, a: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """(x0, eps) [B, C, h, w] that the prediction y at x means."""


@torch.no_grad()
def draw(
    objective: Denoising,
    net: Net,
    cond: Cond,
    null_cond: Cond | None,
    shape: tuple[int, ...],
    seeds: Sequence[int],
    settings: SamplingSettings,
    device: torch.device | str = "cpu",
    known: Known | None = None,
    purpose: str = "sample",
    guidance: Guidance = CLASSIFIER_FREE,
) -> Tensor:
    """One clean sample x0 [B, C, h, w] float32 on `device` for each of B seeds.

    `cond` and `null_cond` hold B rows each, on `device`; the null side is what `guidance` leads away from and may
    be None where the scale runs no null side. `known` are the clean samples, on `device`, from which sampling starts,
    and what is kept of them. `purpose` names the random numbers: those of one purpose have nothing to do with those of
    another, whatever the seeds. All B run at once. `net` is used as it is: put it in evaluation mode and under autocast
    outside.
    """
    assert all(len(rows) == len(seeds) for rows in [*cond.values(), *(null_cond or {}).values()])
    if not seeds:
        return torch.empty((0, *shape), device=device)
    objective = objective.at(shape, settings)
    grid = objective.grid(settings.num_inference_steps, settings.timestep_spacing)
    scale = settings.guidance_scale
    null_cond = null_cond if guidance.runs_null(scale) else None
    scale_B = torch.full((len(seeds),), scale, dtype=torch.float32, device=device)
    predict = guidance.stepping(partial(objective.predict, net), partial(_end, objective, grid))
    y = guidance.guide(predict, cond, null_cond, scale_B, settings.guidance_rescale)

    def path(t: float) -> tuple[Tensor, Tensor]:
        return objective.path(torch.tensor(t, dtype=torch.float64, device="cpu"))

    def denoise(x_BCHW: Tensor, t: float) -> Tensor:
        return objective.solve(x_BCHW, y(x_BCHW, t), *path(t))[0]

    def fresh(step: int) -> Tensor:
        return fresh_noise(seeds, step, shape, purpose).to(device)

    everything = dict(settings) | {"fresh_noise": fresh, "level": objective.level}
    options = {name: everything[name] for name in keywords(settings.sampler)}
    # Drawn on the CPU: a seed gives the same image on every device.
    noise = initial_noise(seeds, shape, purpose).to(device)
    sample = plugins.find("samplers", settings.sampler).sample
    if known is None:
        return sample(denoise, grid.prior_std * noise, grid, **options)
    grid = known.steps(grid)
    return sample(known.keeping(denoise, path, grid, noise), known.start(grid, noise), grid, **options)


def _end(objective: Denoising, grid: Grid, t: float) -> Tensor:
    """The network's input for the noise level to which a step from time t leads."""
    after = max((visited for visited in grid.t_N.tolist() if visited < t), default=0.0)
    return objective.c_noise(torch.tensor(after, dtype=torch.float64))


def initial_noise(seeds: Sequence[int], shape: tuple[int, ...], purpose: str = "sample") -> Tensor:
    """Standard normal noise [B, *shape] float32 on the CPU, row i of its seed alone: where image i starts.

    Scaled by the grid's `prior_std` this is the sampler's first x; unscaled it is what a diffusers pipeline
    takes as `latents`.
    """
    return _normals(seeds, purpose, 0, shape)


def fresh_noise(seeds: Sequence[int], step: int, shape: tuple[int, ...], purpose: str = "sample") -> Tensor:
    """Standard normal noise [B, *shape] float32 on the CPU, row i of its seed alone: what step `step` adds."""
    return _normals(seeds, f"{purpose}/fresh", step, shape)


def _normals(seeds: Sequence[int], purpose: str, number: int, shape: tuple[int, ...]) -> Tensor:
    numbers = np.empty((len(seeds), math.prod(shape)), dtype=np.float32)
    for row, seed in zip(numbers, seeds, strict=True):
        row[:] = keys.normals(seed, purpose, number, count=len(row))
    return torch.from_numpy(numbers).view(len(seeds), *shape)
