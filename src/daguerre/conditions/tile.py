"""The condition `tile`: the image at a lower resolution, for networks that add detail (super-resolution)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

import numpy as np
from PIL import Image
from pydantic import Field

from daguerre.conditions.condition import ConditionSettings, Draw, Range, drawn

Factor = Annotated[float, Field(ge=1, le=64)]
Filter = Literal["nearest", "area", "bilinear", "bicubic", "lanczos"]
_FILTERS: Mapping[str, Image.Resampling] = MappingProxyType(
    {
        "nearest": Image.Resampling.NEAREST,
        "area": Image.Resampling.BOX,
        "bilinear": Image.Resampling.BILINEAR,
        "bicubic": Image.Resampling.BICUBIC,
        "lanczos": Image.Resampling.LANCZOS,
    }
)


class Settings(ConditionSettings):
    """The image made smaller, and as large as before again."""

    name: Literal["tile"] = "tile"
    """The image at a lower resolution."""
    factor: Factor | Range[Factor] = 4.0
    """Divisor of width and height; [least, most]: drawn for each sample."""
    down: Filter = "area"
    """Filter of the way down."""
    up: Filter = "bicubic"
    """Filter of the way up."""


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 3]: the image resized to 1 / factor of its sides, one pixel at least, and back."""
    image, factor = Image.fromarray(pixels_HWC), drawn(settings.factor, draw, "factor")
    small = image.resize([max(1, round(side / factor)) for side in image.size], _FILTERS[settings.down])
    return np.array(small.resize(image.size, _FILTERS[settings.up]))
