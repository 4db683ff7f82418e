"""The condition `palette`: a coarse grid of the image's colours, as the colour adapter of T2I-Adapter has it."""

from typing import Literal

import numpy as np
from PIL import Image
from pydantic import Field

from daguerre.conditions.condition import ConditionSettings, Draw


class Settings(ConditionSettings):
    """Cells of the mean colour of what lies under them."""

    name: Literal["palette"] = "palette"
    """A coarse grid of colours."""
    cell_px: int = Field(64, ge=1, le=1024)
    """Side of a cell, in pixels of the image that is trained on; cells fill the image evenly."""
    colours: int | None = Field(None, ge=2, le=256)
    """Most different colours of the grid, by median cut. Default: as many as there are cells."""


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 3]: floor(side / cell) cells along each side, one at least."""
    image = Image.fromarray(pixels_HWC)
    cells = image.resize([max(1, side // settings.cell_px) for side in image.size], Image.Resampling.BOX)
    if settings.colours is not None:
        cells = cells.quantize(settings.colours, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).convert("RGB")
    return np.array(cells.resize(image.size, Image.Resampling.NEAREST))
