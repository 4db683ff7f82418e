"""Objectives and samplers without a run: the algebra of diffusion for any network."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from daguerre import plugins
from daguerre.config import config as configs
from daguerre.errors import UserError
from daguerre.objectives.algebra import Diffusion
from daguerre.objectives.settings import DiffusionSettings
from daguerre.samplers import draw as drawing
from daguerre.samplers.known import Known
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Cond


def objective(name: str, **settings: Any) -> Diffusion:
    """The objective of this name (`eps`, `v`, `x0`, `edm`, `flow`): its path, target, loss and denoiser, without any
    network. `settings` are those of the section `objective`: schedule={"zero_terminal_snr": True}. UserError for
    settings that it has not, and for an objective that is no diffusion."""
    plugins.check("objectives", name)
    found = plugins.find("objectives", name)
    own = configs.checked(found.Settings, {"name": name, **settings}, (), (), f"objective {name}")
    if not isinstance(own, DiffusionSettings):
        raise UserError(f"objective {name} is no diffusion: it has no noise levels of its own", code="unsupported")
    return found.build(own)


def sampler(name: str) -> Callable[..., Tensor]:
    """The sampler of this name as a function: `sample(denoise, x, grid, **settings)` gives x0 [B, C, h, w].

    `denoise(x, t)` gives x0 [B, C, h, w] for x at time t; x starts as `grid.prior_std` times noise; `grid` is
    `objective(...).grid(steps)`. It calls nothing else, so that any network can stand behind it. UserError.
    """
    plugins.check("samplers", name)
    return plugins.find("samplers", name).sample


def draw(
    objective: Diffusion,
    net: drawing.Net,
    shape: tuple[int, ...],
    seeds: Sequence[int],
    cond: Cond | None = None,
    null_cond: Cond | None = None,
    device: torch.device | str = "cpu",
    known: Known | None = None,
    **settings: Any,
) -> Tensor:
    """One clean sample x0, `[B, *shape]` float32, for each of B seeds, by guidance and sampler.

    `net(x [B, C, h, w], c_noise [B], cond)` gives the prediction of the objective. `cond` and `null_cond` are its
    conditioning, B rows each. `settings` are those of the section `sampling` (docs/samplers.md): sampler="heun",
    num_inference_steps=20, guidance_scale=3.0 (1: no
    guidance). Noise depends on the seed alone. UserError for unknown settings.
    """
    own = configs.checked(SamplingSettings, {"guidance_scale": 1.0, **settings}, (), (), "draw")
    return drawing.draw(objective, net, cond or {}, null_cond, shape, seeds, own, device, known)
