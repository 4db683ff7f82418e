"""The condition `posterize`: the image in few levels of each colour."""

from typing import Literal

import numpy as np
from pydantic import Field

from daguerre.conditions.condition import ConditionSettings, Draw


class Settings(ConditionSettings):
    """The image in few levels of red, green and blue."""

    name: Literal["posterize"] = "posterize"
    """The image in few levels of each colour."""
    levels: int = Field(4, ge=2, le=64)
    """Levels of each colour."""


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 3]: the middle of the level that a value is in."""
    width = 256 / settings.levels
    return ((pixels_HWC // width + 0.5) * width).astype(np.uint8)
