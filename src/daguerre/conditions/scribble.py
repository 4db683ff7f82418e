"""The condition `scribble`: thick lines from the difference of two Gaussians (XDoG), without a network."""

from typing import Literal

import numpy as np
from pydantic import Field

from daguerre.conditions.condition import ConditionSettings, Draw, grey_to_rgb
from daguerre.conditions.filters import blurred

_NARROW_PX, _WIDE_PX = 0.5, 5.0


class Settings(ConditionSettings):
    """White lines on black without shades: what ControlNet's users know as scribble_xdog."""

    name: Literal["scribble"] = "scribble"
    """Thick white lines on black, without shades."""
    threshold: int = Field(32, ge=1, le=509)
    """Twice the difference of the blurred images above which there is a line."""


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 3]: 255 where 2 (255 - floor(255 - d)) > threshold, d the least difference over the channels."""
    darker_HW = (blurred(pixels_HWC, _WIDE_PX) - blurred(pixels_HWC, _NARROW_PX)).min(axis=2)
    drawn_HW = 2 * (255 - np.floor((255 - darker_HW).clip(0, 255)))
    return grey_to_rgb((drawn_HW > settings.threshold) * np.uint8(255))
