"""The condition `grey`: the luminance of the image, for networks that colour or relight."""

from typing import Literal

import numpy as np
from PIL import Image

from daguerre.conditions.condition import ConditionSettings, Draw


class Settings(ConditionSettings):
    """The image in grey: L = .299 R + .587 G + .114 B (ITU-R BT.601), in all three channels."""

    name: Literal["grey"] = "grey"
    """The image in grey."""


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 3]: the luminance, as Pillow rounds it."""
    return np.asarray(Image.fromarray(pixels_HWC).convert("L").convert("RGB"))
