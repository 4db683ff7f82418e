"""PSNR of images and those that they should equal."""

from typing import Literal

from daguerre.evaluation.formulas import pairs
from daguerre.evaluation.metric import Inputs, MetricSettings
from daguerre.evaluation.result import Result, number


class Settings(MetricSettings):
    """PSNR; higher is better. It needs `against`."""

    name: Literal["psnr"] = "psnr"
    """PSNR of pairs."""


def evaluate(settings: Settings, inputs: Inputs) -> dict[str, Result]:
    """The mean over all pairs."""
    found = inputs.pairs("psnr", pairs.psnr)
    return {"psnr": Result(len(found), (number("psnr", found.mean(), "higher"),), "Mean over pairs; higher is better.")}
