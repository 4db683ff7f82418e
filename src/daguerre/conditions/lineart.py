"""The condition `lineart`: dark lines of the image as white lines on black, without a network."""

from typing import Literal

import numpy as np
from pydantic import Field

from daguerre.conditions.condition import ConditionSettings, Draw, grey_to_rgb
from daguerre.conditions.filters import blurred

_HALF, _LEAST = 127, 16


class Settings(ConditionSettings):
    """Lines by how much darker they are than what is around them: what ControlNet's users know as lineart_standard."""

    name: Literal["lineart"] = "lineart"
    """White lines on black, where the image has lines darker than what is around them."""
    sigma_px: float = Field(6.0, ge=0.1, le=256)
    """Standard deviation of the Gaussian that says what is around a pixel."""
    threshold: float = Field(8.0, ge=0, lt=255)
    """Difference above which a pixel counts as a line where the brightness of lines is measured: their median becomes
    half white."""


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 3]: 127 d / max(16, median of d above the threshold), d the least of blur - image over the channels."""
    darker_HW = (blurred(pixels_HWC, settings.sigma_px) - pixels_HWC).min(axis=2).clip(min=0)
    lines = darker_HW[darker_HW > settings.threshold]
    usual = max(_LEAST, np.median(lines)) if lines.size else _LEAST
    return grey_to_rgb((darker_HW / usual * _HALF).clip(max=255).astype(np.uint8))
