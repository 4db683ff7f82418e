"""CLIP score (Hessel et al. 2021, arXiv 2104.08718): the cosine of image and prompt in CLIP's space."""

from typing import ClassVar, Literal

import numpy as np

from daguerre.evaluation.metric import Inputs, MetricSettings
from daguerre.evaluation.result import Result, number


class Settings(MetricSettings):
    """CLIP score; higher is better. Prompts are cut where CLIP's text encoder ends."""

    reads_texts: ClassVar[bool] = True

    name: Literal["clip_score"] = "clip_score"
    """Cosine of images and their prompts."""
    scale: Literal["torchmetrics", "hessel", "cosine"] = "torchmetrics"
    """`torchmetrics`: 100 x the mean cosine, at least 0; `hessel`: 2.5 x max(cosine, 0), then the mean; `cosine`:
    the mean cosine."""


def evaluate(settings: Settings, inputs: Inputs) -> dict[str, Result]:
    """The score over all images."""
    network = inputs.network("clip", crop="shorter_side")
    cosines = cosine(inputs.features(network), inputs.text_features(network))
    value = {
        "torchmetrics": max(100 * cosines.mean(), 0.0),
        "hessel": 2.5 * np.maximum(cosines, 0).mean(),
        "cosine": cosines.mean(),
    }[settings.scale]
    note = f"CLIP score by {network.label}, scale {settings.scale}; higher is better."
    rows = (number("clip_score", value, "higher"),)
    return {f"clip_score-{network.label}": Result(len(cosines), rows, note, network.about)}


def cosine(first_ND: np.ndarray, second_ND: np.ndarray) -> np.ndarray:
    """[n] float64: the cosine of each pair of vectors."""
    first, second = first_ND.astype(np.float64), second_ND.astype(np.float64)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    found: np.ndarray = (first * second).sum(axis=1) / lengths
    return found
