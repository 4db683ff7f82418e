"""The condition `canny`: edges by Canny (IEEE PAMI 8(6), 1986), equal to OpenCV's `cv2.Canny` to the bit.

That is: Sobel's 3 x 3 kernels in integers with the border repeated, |dx| + |dy| of the channel in which it is largest,
suppression of what is no maximum across the edge, in four directions, and hysteresis over the eight neighbours.
"""

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from daguerre.conditions import filters
from daguerre.conditions.condition import ConditionSettings, Draw, grey_to_rgb

_TAN_22_5 = 13573
"""tan(22.5 degrees) in units of 2^-15."""
_WEAK, _EDGE = 1, 2


class Settings(ConditionSettings):
    """White edges on black, one pixel wide (Canny)."""

    name: Literal["canny"] = "canny"
    """White edges on black, one pixel wide."""
    low: int = Field(100, ge=0, le=2040)
    """Gradient above which a pixel is an edge if it touches one: |dx| + |dy| of Sobel's kernels, up to 2040."""
    high: int = Field(200, ge=0, le=2040)
    """Gradient above which a pixel is an edge in any case."""
    side_px: int | None = Field(None, ge=8, le=4096)
    """Edges are found in a square of this side, of the image squeezed into it, and scaled back, as Stable Cascade's
    ControlNets know them (224). null: in the image as it is."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}: edges grow from `high` down to `low`")
        return self


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 3]: 255 at edges, else 0; shades between them where a square is scaled back."""
    if settings.side_px is None:
        return grey_to_rgb(_edges(settings, pixels_HWC))
    shares_HWC = filters.resized(pixels_HWC.astype(np.float32) / 255, settings.side_px, settings.side_px)
    edges_HW = _edges(settings, (shares_HWC * 255).astype(np.uint8))
    soft_HW1 = filters.resized(edges_HW[:, :, None], *pixels_HWC.shape[:2])
    return grey_to_rgb(np.rint(soft_HW1[:, :, 0]).astype(np.uint8))


def _edges(settings: Settings, pixels_HWC: np.ndarray) -> np.ndarray:
    """[H, W]: 255 at edges, else 0."""
    size_HW, dx_HW, dy_HW = _strongest(*_gradients(pixels_HWC))
    width = size_HW.shape[1]
    around = np.pad(size_HW, 1)  # 0 outside
    size_N, line = around.ravel(), width + 2
    candidates = np.flatnonzero(size_HW > settings.low)
    step = _across(dx_HW.ravel()[candidates], dy_HW.ravel()[candidates], line)
    at = candidates + 2 * (candidates // width) + line + 1
    here = size_N[at]
    before, after = size_N[at - step], size_N[at + step]
    straight = (step == 1) | (step == line)
    maximal = (here > before) & ((here > after) | (straight & (here == after)))
    state_N = np.zeros(len(size_N), dtype=np.uint8)
    state_N[at[maximal]] = _WEAK
    _grow(state_N, at[maximal & (here > settings.high)], line)
    return (state_N.reshape(around.shape)[1:-1, 1:-1] == _EDGE) * np.uint8(255)


def _gradients(pixels_HWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sobel's dx and dy [H, W, C] int16."""
    around = np.pad(pixels_HWC.astype(np.int16), ((1, 1), (1, 1), (0, 0)), mode="edge")
    down = around[:-2] + 2 * around[1:-1] + around[2:]
    right = around[:, :-2] + 2 * around[:, 1:-1] + around[:, 2:]
    return down[:, 2:] - down[:, :-2], right[2:] - right[:-2]


def _strongest(dx_HWC: np.ndarray, dy_HWC: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[H, W] int16 each: |dx| + |dy| of the first channel in which it is largest, and its dx and dy."""
    size_HWC = np.abs(dx_HWC) + np.abs(dy_HWC)
    size_HW, dx_HW, dy_HW = size_HWC[:, :, 0].copy(), dx_HWC[:, :, 0].copy(), dy_HWC[:, :, 0].copy()
    for channel in range(1, size_HWC.shape[2]):
        larger = size_HWC[:, :, channel] > size_HW
        for best_HW, each_HWC in ((size_HW, size_HWC), (dx_HW, dx_HWC), (dy_HW, dy_HWC)):
            np.copyto(best_HW, each_HWC[:, :, channel], where=larger)
    return size_HW, dx_HW, dy_HW


def _across(dx_N: np.ndarray, dy_N: np.ndarray, line: int) -> np.ndarray:
    """[N] int64: the step to the neighbour across the edge, in an array with lines of this length."""
    x_N, y_N = np.abs(dx_N.astype(np.int64)), np.abs(dy_N.astype(np.int64)) << 15
    flat = y_N < x_N * _TAN_22_5
    steep = y_N > x_N * (_TAN_22_5 + (1 << 16))
    slope = np.where((dx_N ^ dy_N) < 0, -1, 1)
    return np.where(flat, 1, np.where(steep, line, line + slope))


def _grow(state_N: np.ndarray, front: np.ndarray, line: int) -> None:
    """Makes edges of the pixels in `front`, and of all weak ones that are connected to them."""
    around = np.array([-line - 1, -line, -line + 1, -1, 1, line - 1, line, line + 1])
    state_N[front] = _EDGE
    while front.size:
        near = (front[:, None] + around).ravel()
        front = np.unique(near[state_N[near] == _WEAK])
        state_N[front] = _EDGE
