"""CMMD (Jayasumana et al. 2024, arXiv 2401.09603): distance of CLIP's embeddings of images by a Gaussian kernel."""

from collections.abc import Callable
from typing import Literal

import numpy as np

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


def of_groups(settings: Settings, inputs: Inputs, group_N: np.ndarray) -> Callable[[np.ndarray], dict[str, float]]:
    """CMMD of the images of some groups, less what is the reference's alone, which cancels in a difference."""
    network = inputs.network("clip", crop="square_first")
    value = kernels.cmmd_of_groups(inputs.features(network), inputs.reference(network).features(), group_N)
    return lambda kept: {"cmmd": value(kept)}
