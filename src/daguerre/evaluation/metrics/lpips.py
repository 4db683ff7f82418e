"""LPIPS of images and those that they should equal."""

from typing import Literal

from daguerre.evaluation.metric import Inputs, MetricSettings
from daguerre.evaluation.result import Result, number


class Settings(MetricSettings):
    """LPIPS; lower is better. It needs `against`."""

    name: Literal["lpips"] = "lpips"
    """LPIPS (VGG16) of pairs."""


def evaluate(settings: Settings, inputs: Inputs) -> dict[str, Result]:
    """The mean over all pairs."""
    network = inputs.network("lpips")
    name = f"lpips-{network.label}"
    found = inputs.pairs(name, network.distance)
    row = number("lpips", found.mean(), "lower")
    return {name: Result(len(found), (row,), "Mean over pairs; lower is better.", network.about)}
