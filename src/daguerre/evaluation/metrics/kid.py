"""Kernel Inception distance (Bińkowski et al. 2018, arXiv 1801.01401)."""

from typing import Literal

from pydantic import Field

from daguerre.evaluation.formulas import kernels
from daguerre.evaluation.metric import Inputs, MetricSettings
from daguerre.evaluation.networks.resize import Policy
from daguerre.evaluation.result import Result, number


class Settings(MetricSettings):
    """KID: unbiased distance by a cubic kernel; lower is better, and it may be negative."""

    name: Literal["kid"] = "kid"
    """Kernel distance of Inception's features."""
    resize: Policy = "tensorflow"
    """As for fid."""
    subsets: int = Field(100, ge=2)
    """Subsets of which the mean is taken."""
    subset_size: int = Field(1000, ge=2)
    """Images of a subset; fewer if there are fewer."""


def evaluate(settings: Settings, inputs: Inputs) -> dict[str, Result]:
    """Mean and standard deviation over subsets that are drawn by a fixed seed."""
    network = inputs.network("inception", resize=settings.resize)
    reference, features = inputs.reference(network), inputs.features(network)
    found = kernels.kid_subsets(features, reference.features(), settings.subsets, settings.subset_size)
    rows = (number("kid", found.mean(), "lower"), number("standard_deviation", found.std(), ""))
    size = min(settings.subset_size, len(features), reference.count)
    note = f"KID by {network.label}: mean and deviation over {settings.subsets} subsets of {size} images."
    made_with = {**network.about, "reference": reference.about}
    return {f"kid-{network.label}": Result(len(features), rows, note, made_with)}
