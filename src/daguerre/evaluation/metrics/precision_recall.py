"""Improved precision and recall (Kynkäänniemi et al. 2019, arXiv 1904.06991), on Inception's features."""

from typing import Literal

from pydantic import Field

from daguerre.errors import UserError
from daguerre.evaluation.formulas import neighbours
from daguerre.evaluation.metric import Inputs, MetricSettings
from daguerre.evaluation.networks.resize import Policy
from daguerre.evaluation.result import Result, Row


class Settings(MetricSettings):
    """Precision: share of images that lie among those of the reference. Recall: share of the reference that lies among
    the images."""

    name: Literal["precision_recall"] = "precision_recall"
    """Shares of images within the neighbourhoods of the other set."""
    resize: Policy = "tensorflow"
    """As for fid."""
    neighbours: int = Field(3, ge=1)
    """The neighbour whose distance is the radius."""


def evaluate(settings: Settings, inputs: Inputs) -> dict[str, Result]:
    """Both shares."""
    network = inputs.network("inception", resize=settings.resize)
    reference, features = inputs.reference(network), inputs.features(network)
    k = settings.neighbours
    if min(len(features), reference.count) <= k:
        raise UserError(f"metrics.precision_recall.neighbours={k} needs more images than that, of both sets")
    precision, recall = neighbours.precision_recall(features, reference.features(), k)
    note = f"By {network.label}, radius to neighbour {k}. Both depend on the number of images."
    made_with = {**network.about, "reference": reference.about}
    rows = (Row("precision", precision), Row("recall", recall))
    return {f"precision_recall-{network.label}": Result(len(features), rows, note, made_with)}
