"""The condition `grey`: the luminance of the image, for networks that colour or relight."""

from typing import Literal

import numpy as np

from daguerre.conditions.condition import ConditionSettings, Draw, grey_to_rgb, luminance


class Settings(ConditionSettings):
    """The image in grey: .299 R + .587 G + .114 B (ITU-R BT.601)."""

    name: Literal["grey"] = "grey"
    """The image in grey."""


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 3]: the luminance."""
    return grey_to_rgb(luminance(pixels_HWC))
