"""The condition `threshold`: the image in black and white, for light and shadow or codes."""

from typing import Literal

import numpy as np
from pydantic import Field

from daguerre.conditions.condition import ConditionSettings, Draw, grey_to_rgb, luminance


class Settings(ConditionSettings):
    """Black and white by the luminance."""

    name: Literal["threshold"] = "threshold"
    """Black and white by the luminance."""
    level: int = Field(127, ge=0, lt=255)
    """Luminance above which a pixel is white."""


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 3]: 255 above the level, else 0."""
    return grey_to_rgb((luminance(pixels_HWC) > settings.level) * np.uint8(255))
