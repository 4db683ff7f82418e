"""Objective `x0`: the network predicts the clean sample. Undefined at s = 0, which no schedule it runs on reaches."""

from typing import Literal

import torch
from torch import Tensor

from daguerre.objectives import algebra
from daguerre.objectives.settings import DiffusionSettings


class Settings(DiffusionSettings):
    """Prediction of the clean sample on a variance-preserving schedule."""

    name: Literal["x0"] = "x0"
    """The clean sample is predicted."""


def target(a: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """y = x0; d = -s."""
    return torch.ones_like(a), torch.zeros_like(a)


def build(settings: Settings) -> algebra.Diffusion:
    return algebra.build(settings, target)
