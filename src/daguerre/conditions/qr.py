"""The condition `qr`: the image in black, grey and white areas by brightness, to hide codes and drawings in images.

It follows Stable Cascade's QRFilter, but that each image has thresholds of its own.
"""

from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, Field

from daguerre.conditions import filters
from daguerre.conditions.condition import ConditionSettings, Draw, grey_to_rgb
from daguerre.errors import UserError

_SHARE = np.float32(0.33)
"""Of the range of brightness at either end that becomes black or white."""
_SIGMAS = (0.1, 2.0)
_RADIUS_SQUARED = 0.3
"""Of a disc, in units of the squared side of its kernel."""


def _odd(side: int) -> int:
    if side % 2 == 0 and side:
        raise UserError(f"a kernel of {side} has no middle: give an odd number, or 0 for none")
    return side


Kernel = Annotated[int, Field(ge=0, le=63), AfterValidator(_odd)]


class Settings(ConditionSettings):
    """Black, grey and white areas by brightness (Stable Cascade's QRFilter)."""

    name: Literal["qr"] = "qr"
    """Black, grey and white areas by brightness."""
    side_px: int | None = Field(224, ge=32, le=4096)
    """The areas are found in a square of this side, of the image squeezed into it; null: in the image as it is."""
    blobs: bool = True
    """Blur the image and close small dark spots before."""
    dilation: tuple[Kernel, ...] = Field((3, 5, 7), min_length=1)
    """Sides of discs by which dark spots are closed, in pixels; one is drawn for each image, 0 leaves this out."""
    blur: tuple[Kernel, ...] = Field((15,), min_length=1)
    """Sides of the blur's kernel, in pixels; one is drawn for each image. Its sigma is drawn from 0.1 to 2 px."""


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 3]: black, grey (127) and white, and shades between them where the square is scaled back."""
    height, width = pixels_HWC.shape[:2]
    x_HWC = pixels_HWC.astype(np.float32) / 255
    if settings.side_px is not None:
        x_HWC = filters.resized(x_HWC, settings.side_px, settings.side_px)
    value_HW = x_HWC.max(axis=2)
    if settings.blobs:
        value_HW = _blobs(settings, value_HW, draw)
    most, least = value_HW.max(), value_HW.min()
    margin = (most - least) * _SHARE
    white, black = value_HW > most - margin, value_HW < least + margin
    areas_HW = (1 - black.astype(np.float32) + white) * np.float32(0.5)
    if settings.side_px is not None:
        areas_HW = filters.resized(areas_HW[:, :, None], height, width)[:, :, 0]
    return grey_to_rgb((areas_HW * 255).astype(np.uint8))


def _blobs(settings: Settings, value_HW: np.ndarray, draw: Draw) -> np.ndarray:
    """Blurred, dilated and eroded by kernels that are drawn."""
    chance = draw("blobs", 3)
    disc = settings.dilation[int(chance[0] * len(settings.dilation))]
    kernel = settings.blur[int(chance[1] * len(settings.blur))]
    if kernel:
        value_HW = _blurred(value_HW, kernel, _SIGMAS[0] + (_SIGMAS[1] - _SIGMAS[0]) * float(chance[2]))
    if disc:
        value_HW = -_dilated(-_dilated(value_HW, disc), disc)
    return value_HW


def _blurred(value_HW: np.ndarray, kernel: int, sigma: float) -> np.ndarray:
    """By a Gaussian of so many pixels, the border reflected."""
    half = kernel // 2
    x = np.arange(-half, half + 1, dtype=np.float32)
    bell = np.exp(-0.5 * (x / np.float32(sigma)) ** 2)
    bell /= bell.sum()
    for axis in (0, 1):
        around = _reflected(value_HW, half, axis)
        length = value_HW.shape[axis]
        value_HW = sum(bell[i] * np.take(around, np.arange(i, i + length), axis) for i in range(kernel))
    return value_HW


def _reflected(value_HW: np.ndarray, width: int, axis: int) -> np.ndarray:
    """With so many more pixels at both ends of an axis; of a single line, the line again."""
    more = [(width, width) if own == axis else (0, 0) for own in (0, 1)]
    return np.pad(value_HW, more, mode="reflect" if value_HW.shape[axis] > 1 else "edge")


def _dilated(value_HW: np.ndarray, side: int) -> np.ndarray:
    """The largest value within a disc; what is outside of the image does not count."""
    places = np.linspace(-0.5, 0.5, side, dtype=np.float32) ** 2 if side > 1 else np.zeros(1)
    half, (height, width) = side // 2, value_HW.shape
    around = np.pad(value_HW, half, constant_values=-np.inf)
    inside = np.argwhere(places[:, None] + places[None] < _RADIUS_SQUARED)
    return np.max([around[y : y + height, x : x + width] for y, x in inside], axis=0)
