"""Objective `edm`: the network predicts F of Karras et al. 2022 (arXiv 2206.00364), or its negative.

F is x0 and noise mixed so that it has unit variance at every noise level, as the network's input has. With
sigma_data 1 its negative is the velocity of the scaled input, a eps - s x0: CosXL's UNet predicts that.
"""

from functools import partial
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from daguerre.objectives import algebra
from daguerre.objectives.settings import DiffusionSettings, ScheduleSettings, TimesSettings


class Settings(DiffusionSettings):
    """Prediction of EDM's F on the variance-exploding path; defined at every noise level above 0."""

    schedules: ClassVar[tuple[str, ...]] = ("edm",)

    name: Literal["edm"] = "edm"
    """EDM's F is predicted."""
    prediction: Literal["F", "v"] = "F"
    """F: as EDM has it; v: -F, as CosXL has it (sigma_data 1, sigma_max 120). diffusers' EDM schedulers call them
    epsilon and v_prediction."""
    sigma_data: float = Field(0.5, gt=0)
    """Standard deviation of the clean samples, pixels or latents as they are trained on."""
    schedule: ScheduleSettings = ScheduleSettings(name="edm")
    """How much signal and noise there is at each time."""
    times: TimesSettings = TimesSettings(name="log_normal", mean=-1.2, std=1.2)
    """The law from which training times are drawn."""


def target(a: Tensor, s: Tensor, sigma_data: float) -> tuple[Tensor, Tensor]:
    """y = (sigma/(sd r)) x0 - (sd/r) eps with r = sqrt(sigma^2 + sd^2); d = -r/sd. From eq. 8 and table 1."""
    r = (s**2 + sigma_data**2).sqrt()
    return s / (sigma_data * r), -sigma_data / r


def negative(a: Tensor, s: Tensor, sigma_data: float) -> tuple[Tensor, Tensor]:
    """y = -F; d = r/sd."""
    p, q = target(a, s, sigma_data)
    return -p, -q


def input_scale(a: Tensor, s: Tensor, sigma_data: float) -> Tensor:
    """c_in = 1/r: the network's input has unit variance."""
    return (s**2 + sigma_data**2).rsqrt()


def build(settings: Settings) -> algebra.Diffusion:
    chosen = {"F": target, "v": negative}[settings.prediction]
    scale = partial(input_scale, sigma_data=settings.sigma_data)
    return algebra.build(settings, partial(chosen, sigma_data=settings.sigma_data), scale)
