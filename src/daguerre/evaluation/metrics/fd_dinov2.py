"""FD-DINOv2 (Stein et al. 2023, arXiv 2306.04675): the Fréchet distance of DINOv2's features."""

from typing import Literal

from daguerre.evaluation.formulas import frechet
from daguerre.evaluation.metric import Inputs, MetricSettings
from daguerre.evaluation.networks.dinov2 import Resize
from daguerre.evaluation.result import Result, number


class Settings(MetricSettings):
    """FD-DINOv2; lower is better. Published numbers are of ViT-L/14 and 50,000 images."""

    name: Literal["fd_dinov2"] = "fd_dinov2"
    """Fréchet distance of DINOv2's features."""
    resize: Resize = "pillow_bicubic"
    """The way images are brought to 224 px: as in dgm-eval (`pillow_bicubic`) or EDM2 (`antialias_bicubic`)."""


def evaluate(settings: Settings, inputs: Inputs) -> dict[str, Result]:
    """The distance of the images to the reference. It falls with the number of images: compare equal numbers."""
    network = inputs.network("dinov2", resize=settings.resize)
    reference, features = inputs.reference(network), inputs.features(network)
    own, other = frechet.moments(features), reference.moments()
    row = number("fd_dinov2", frechet.distance(own, other), "lower")
    note = f"Fréchet distance by {network.label}; lower is better. Compare only equal numbers of images."
    made_with = {**network.about, "reference": reference.about}
    return {f"fd_dinov2-{network.label}": Result(len(features), (row,), note, made_with, frechet.warning(own, other))}
