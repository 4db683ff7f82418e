"""Objective `eps`: the network predicts the noise (Ho et al. 2020, arXiv 2006.11239, eq. 14). Undefined at a = 0."""

from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from daguerre.objectives import algebra
from daguerre.objectives.settings import DiffusionSettings


class Settings(DiffusionSettings):
    """Prediction of the noise on a variance-preserving schedule."""

    name: Literal["eps"] = "eps"
    """The noise is predicted."""

    @model_validator(mode="after")
    def _refuse_zero_terminal_snr(self) -> Self:
        if self.schedule.zero_terminal_snr:
            raise ValueError(
                "schedule.zero_terminal_snr is on: at the last timestep x_t is the noise itself, so predicting eps "
                "tells nothing about x0 (a = 0) and the loss weights are infinite: use objective v, or switch it off"
            )
        return self


def target(a: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """y = eps; d = a."""
    return torch.zeros_like(a), torch.ones_like(a)


def build(settings: Settings) -> algebra.Diffusion:
    return algebra.build(settings, target)
