"""diffusers' schedulers run as its pipelines run them, with every x on the way in our frame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from daguerre import plugins
from daguerre.objectives.algebra import Diffusion
from daguerre.types import Grid

Net = Callable[..., Tensor]
STOCHASTIC = ("euler_ancestral", "dpmpp_2m_sde")
"""Samplers that draw noise at each step, which takes most of their time."""


def objective_of(name: str, /, **schedule: Any) -> Diffusion:
    """An objective with these settings of its schedule."""
    module = plugins.find("objectives", name)
    return module.build(module.Settings(schedule=schedule))


def run_scheduler(scheduler: Any, net: Net, latents: Tensor, num_steps: int, **set_timesteps: Any) -> list[Tensor]:
    """Every x that the network is shown, and the last one, as StableDiffusionPipeline's loop makes them."""
    scheduler.set_timesteps(**(set_timesteps or {"num_inference_steps": num_steps}))
    x = latents * getattr(scheduler, "init_noise_sigma", 1.0)
    visited = []
    for t in scheduler.timesteps:
        x_in = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        visited.append(x_in)
        x = scheduler.step(net(x_in, t.expand(len(x)), {}), t, x, return_dict=False)[0]
    return [*visited, x]


def run_ours(objective: Diffusion, sampler: str, net: Net, latents: Tensor, grid: Grid, **own: Any) -> list[Tensor]:
    """Every x that the network is shown, c_in applied, and the clean one, from our sampler."""
    visited = []

    def watched(x_in: Tensor, c_noise_B: Tensor, cond: Any) -> Tensor:
        visited.append(x_in)
        return net(x_in, c_noise_B, cond)

    x0 = plugins.find("samplers", sampler).sample(
        lambda x, t: objective.denoise(watched, x, t, {}), grid.prior_std * latents, grid, **own
    )
    return [*visited, x0]


def betas_of(objective: Diffusion, t_N: Tensor) -> list[float]:
    """diffusers' `trained_betas` of any variance-preserving path seen at times t_N: 1 - a_i^2 / a_(i-1)^2."""
    squared = objective.path(t_N)[0] ** 2
    return (1 - squared / torch.cat([squared.new_ones(1), squared[:-1]])).tolist()
