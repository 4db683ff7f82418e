"""SSIM of images and those that they should equal."""

from typing import Literal

from daguerre.evaluation.formulas import pairs
from daguerre.evaluation.metric import Inputs, MetricSettings
from daguerre.evaluation.result import Result, number


class Settings(MetricSettings):
    """SSIM; higher is better. It needs `against`."""

    name: Literal["ssim"] = "ssim"
    """SSIM of pairs."""


def evaluate(settings: Settings, inputs: Inputs) -> dict[str, Result]:
    """The mean over all pairs."""
    found = inputs.pairs("ssim", pairs.ssim)
    return {"ssim": Result(len(found), (number("ssim", found.mean(), "higher"),), "Mean over pairs; higher is better.")}
