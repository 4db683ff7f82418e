"""Objective `flow`: the network predicts eps - x0, the speed along a straight path (rectified flow).

Liu et al. 2023 (arXiv 2209.03003); time law and shift as in Esser et al. 2024 (arXiv 2403.03206).
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from daguerre.objectives import algebra
from daguerre.objectives.settings import DiffusionSettings, ScheduleSettings, TimesSettings


class Settings(DiffusionSettings):
    """Prediction of the speed on the linear path; defined at every noise level."""

    schedules: ClassVar[tuple[str, ...]] = ("linear_flow",)

    name: Literal["flow"] = "flow"
    """The speed eps - x0 is predicted."""
    schedule: ScheduleSettings = ScheduleSettings(name="linear_flow")
    """How much signal and noise there is at each time."""
    times: TimesSettings = TimesSettings(name="logit_normal", mean=0.0, std=1.0)
    """The law from which training times are drawn."""


def target(a: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """y = eps - x0; d = a + s = 1."""
    return -torch.ones_like(a), torch.ones_like(a)


def build(settings: Settings) -> algebra.Diffusion:
    return algebra.build(settings, target)
