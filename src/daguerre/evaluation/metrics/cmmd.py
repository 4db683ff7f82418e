"""CMMD (Jayasumana et al. 2024, arXiv 2401.09603): distance of CLIP's embeddings of images by a Gaussian kernel."""

from typing import Literal

from daguerre.evaluation.formulas import kernels
from daguerre.evaluation.metric import Inputs, MetricSettings
from daguerre.evaluation.result import Result, number


class Settings(MetricSettings):
    """CMMD; lower is better. Published numbers are of CLIP ViT-L/14 at 336 px."""

    name: Literal["cmmd"] = "cmmd"
    """Kernel distance of CLIP's embeddings."""


def evaluate(settings: Settings, inputs: Inputs) -> dict[str, Result]:
    """The distance of the images to the reference, in thousandths."""
    network = inputs.network("clip", crop="square_first")
    reference, features = inputs.reference(network), inputs.features(network)
    row = number("cmmd", kernels.cmmd(features, reference.features()), "lower")
    note = f"CMMD by {network.label}; lower is better."
    made_with = {**network.about, "reference": reference.about}
    return {f"cmmd-{network.label}": Result(len(features), (row,), note, made_with)}
