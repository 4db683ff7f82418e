"""Objective `v`: the network predicts a eps - s x0 (Salimans and Ho 2022, arXiv 2202.00512, appendix D)."""

from typing import Literal

from torch import Tensor

from daguerre.objectives import algebra
from daguerre.objectives.settings import DiffusionSettings


class Settings(DiffusionSettings):
    """Prediction of the velocity on a variance-preserving schedule; defined at every noise level."""

    name: Literal["v"] = "v"
    """The velocity is predicted."""


def target(a: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """y = a eps - s x0; d = 1."""
    return -s, a


def build(settings: Settings) -> algebra.Diffusion:
    return algebra.build(settings, target)
