"""The condition `blur`: a Gaussian blur of the image, for networks that sharpen."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from daguerre.conditions.condition import ConditionSettings, Draw, Range, drawn
from daguerre.conditions.filters import blurred

Sigma = Annotated[float, Field(ge=0.1, le=256)]


class Settings(ConditionSettings):
    """The image blurred by a Gaussian."""

    name: Literal["blur"] = "blur"
    """The image blurred by a Gaussian."""
    sigma_px: Sigma | Range[Sigma] = 9.0
    """Standard deviation of the Gaussian, in pixels of the image that is trained on; [least, most]: drawn for each
    sample."""


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 3]: the blurred image."""
    return np.rint(blurred(pixels_HWC, drawn(settings.sigma_px, draw, "sigma"))).astype(np.uint8)
