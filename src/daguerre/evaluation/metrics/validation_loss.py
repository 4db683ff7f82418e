"""Validation loss by noise level: the loss on held-out samples at fixed quantiles of the law of times."""

from typing import ClassVar, Literal

from pydantic import Field

from daguerre.evaluation.metric import Inputs, MetricSettings
from daguerre.evaluation.result import Result, number


class Settings(MetricSettings):
    """Loss on held-out samples; lower is better. Noise is a function of sample and quantile alone."""

    own_samples: ClassVar[bool] = True

    name: Literal["validation_loss"] = "validation_loss"
    """Loss on held-out samples by noise level, by raw and averaged weights."""
    quantiles: list[float] = Field([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], min_length=1)
    """Quantiles of the objective's law of times, in (0, 1): 0 is the clean end."""
    num_samples: int = Field(256, ge=1)
    """Held-out samples (fewer if the source holds out fewer)."""


def evaluate(settings: Settings, inputs: Inputs) -> dict[str, Result]:
    """A table for each set of weights: the mean loss at each quantile, and over all."""
    found = {}
    for weights, losses in inputs.losses(settings.quantiles, settings.num_samples).items():
        rows = [number("mean", losses.mean(), "lower")]
        each = zip(settings.quantiles, losses.mean(axis=0), strict=True)
        rows += [number(f"quantile_{quantile:g}", value, "lower") for quantile, value in each]
        note = f"Loss on held-out samples by the {weights} weights at fixed noise; lower is better."
        found[f"validation_loss-{weights}"] = Result(len(losses), tuple(rows), note)
    return found
