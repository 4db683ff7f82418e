"""The condition `outpaint`: a rectangle of the image; what is around it is unknown."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from daguerre.conditions.condition import ConditionSettings, Draw, Range, drawn, with_holes

Share = Annotated[float, Field(ge=0, lt=1)]
Side = Literal["left", "right", "top", "bottom"]


class Settings(ConditionSettings):
    """A rectangle of the image at a random place; what is around it is unknown."""

    name: Literal["outpaint"] = "outpaint"
    """A rectangle of the image, with nothing around it."""
    share: Share | Range[Share] = (0.1, 0.5)
    """Share of the area that is unknown; [least, most]: drawn for each sample."""
    sides: tuple[Side, ...] = Field(("left", "right", "top", "bottom"), min_length=1)
    """Sides on which something may be unknown."""


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 4]: transparent black around the rectangle, whose sides and place are drawn."""
    height, width = pixels_HWC.shape[:2]
    known = 1 - drawn(settings.share, draw, "share")
    balance, x, y = draw("rectangle", 3).tolist()
    across, down = ({"left", "right"} & {*settings.sides}), ({"top", "bottom"} & {*settings.sides})
    balance = balance if across and down else 1.0 if across else 0.0
    left, right = _kept(width, known**balance, x, "left" in across, "right" in across)
    top, bottom = _kept(height, known ** (1 - balance), y, "top" in down, "bottom" in down)
    unknown_HW = np.ones((height, width), dtype=bool)
    unknown_HW[top:bottom, left:right] = False
    return with_holes(pixels_HWC, unknown_HW)


def _kept(size: int, share: float, place: float, before: bool, after: bool) -> tuple[int, int]:
    """First and last pixel (excluded) of what is known along an axis, one pixel at least."""
    length = max(1, round(size * share))
    place = place if before and after else 1.0 if before else 0.0
    start = round((size - length) * place)
    return start, start + length
