"""Kernel Inception distance (Bińkowski et al. 2018, arXiv 1801.01401)."""

from collections.abc import Callable
from typing import Literal

import numpy as np
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
    """Mean and standard deviation over subsets that are drawn by a fixed seed; over the images alone where a subset
    would have all of them."""
    network = inputs.network("inception", resize=settings.resize)
    reference, features = inputs.reference(network), inputs.features(network)
    size = min(settings.subset_size, len(features), reference.count)
    # Subsets of everything are one subset: their deviation of 0 would say that the number is exact.
    count = 1 if size == len(features) == reference.count else settings.subsets
    found = kernels.kid_subsets(features, reference.features(), count, size)
    rows = [number("kid", found.mean(), "lower")]
    note = f"KID by {network.label}: all {size} images of both sets, so without a deviation over subsets."
    if count > 1:
        rows.append(number("standard_deviation", found.std(), ""))
        note = f"KID by {network.label}: mean and deviation over {count} subsets of {size} images."
        if size in (len(features), reference.count):
            note += " One of the two sets is the same in all of them, so the deviation is that of the other alone."
    made_with = {**network.about, "reference": reference.about}
    return {f"kid-{network.label}": Result(len(features), tuple(rows), note, made_with)}


def of_groups(settings: Settings, inputs: Inputs, group_N: np.ndarray) -> Callable[[np.ndarray], dict[str, float]]:
    """KID of all pairs of the images of some groups, less what is the reference's alone: a difference of two such is
    that of the means over subsets."""
    network = inputs.network("inception", resize=settings.resize)
    value = kernels.kid_of_groups(inputs.features(network), inputs.reference(network).features(), group_N)
    return lambda kept: {"kid": value(kept)}
