"""The condition `sobel`: the size of the gradient, for soft edges without a network."""

from typing import Literal

import numpy as np

from daguerre.conditions.condition import ConditionSettings, Draw, grey_to_rgb, luminance


class Settings(ConditionSettings):
    """Soft white edges on black: the gradient of the luminance by Sobel's kernels, sqrt((dx^2 + dy^2) / 2) / 4."""

    name: Literal["sobel"] = "sobel"
    """Soft white edges on black."""


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 3]: as `skimage.filters.sobel` of the luminance; 255 for the steepest step that there is."""
    around = np.pad(luminance(pixels_HWC).astype(np.float32), 1, mode="symmetric")
    down = around[:-2] + 2 * around[1:-1] + around[2:]
    right = around[:, :-2] + 2 * around[:, 1:-1] + around[:, 2:]
    size_HW = np.hypot(down[:, 2:] - down[:, :-2], right[2:] - right[:-2]) / np.float32(4 * 2**0.5)
    return grey_to_rgb(np.rint(size_HW).astype(np.uint8))
