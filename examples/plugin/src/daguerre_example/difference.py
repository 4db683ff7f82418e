"""Objective `difference`: the network predicts eps - x0 on a variance-preserving schedule."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from daguerre.objectives import algebra
from daguerre.objectives.settings import DiffusionSettings


class Settings(DiffusionSettings):
    """Prediction of noise minus image; d = a + s, so it is defined at every noise level."""

    name: Literal["difference"] = "difference"
    """The difference of noise and image is predicted."""


def target(a: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """y = eps - x0."""
    return -torch.ones_like(a), torch.ones_like(a)


def build(settings: Settings) -> algebra.Diffusion:
    """The objective of these settings."""
    return algebra.build(settings, target)
