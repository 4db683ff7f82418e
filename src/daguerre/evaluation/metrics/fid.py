"""Fréchet Inception distance (Heusel et al. 2017, arXiv 1706.08500)."""

from typing import Literal

from daguerre.evaluation.formulas import frechet
from daguerre.evaluation.metric import Inputs, MetricSettings
from daguerre.evaluation.networks.resize import Policy
from daguerre.evaluation.result import Result, number


class Settings(MetricSettings):
    """FID: distance of the features' normal distributions; lower is better."""

    name: Literal["fid"] = "fid"
    """Fréchet distance of Inception's features."""
    resize: Policy = "tensorflow"
    """The way images are brought to 299 px: as in the original and torch-fidelity (`tensorflow`), pytorch-fid
    (`torch`), clean-fid (`pillow_bicubic`) or torchmetrics (`antialias`)."""


def evaluate(settings: Settings, inputs: Inputs) -> dict[str, Result]:
    """FID of the images to the reference. It falls with the number of images: compare equal numbers."""
    network = inputs.network("inception", resize=settings.resize)
    reference, features = inputs.reference(network), inputs.features(network)
    own, other = frechet.moments(features), reference.moments()
    row = number("fid", frechet.distance(own, other), "lower")
    note = f"FID by {network.label}; lower is better. Compare only equal numbers of images."
    made_with = {**network.about, "reference": reference.about}
    return {f"fid-{network.label}": Result(len(features), (row,), note, made_with, frechet.warning(own, other))}
