"""Gaussian blur in float64, for conditions: the same numbers to the bit on any machine and any number of threads."""

import numpy as np

_SCALE = 1 << 20
"""Weights are multiples of 1 / _SCALE: sums of 8 + 20 + 20 bits are exact in float64, whatever their order."""


def blurred(pixels_HWC: np.ndarray, sigma_px: float) -> np.ndarray:
    """[H, W, C] float64 of [H, W, C] uint8, reflected at the border (dcb|abcd|cba): `cv2.GaussianBlur` of float32."""
    weights = _weights(sigma_px)
    down = _along_first(pixels_HWC.astype(np.float64), weights)
    return _along_first(down.transpose(1, 0, 2), weights).transpose(1, 0, 2)


def _weights(sigma_px: float) -> np.ndarray:
    """[2 r + 1], r = 4 sigma: sum 1."""
    radius = round(4 * sigma_px)
    weights = np.exp(-(np.arange(-radius, radius + 1) ** 2) / (2 * sigma_px**2))
    weights = np.round(weights / weights.sum() * _SCALE) / _SCALE
    weights[radius] += 1 - weights.sum()
    return weights


def _along_first(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Values [N, ...] convolved along the first axis, as products with a band of the weights."""
    size, reach = len(values), len(weights) - 1
    flat = values.reshape(size, -1)
    around = np.pad(flat, ((reach // 2, reach // 2), (0, 0)), mode="reflect")
    block = max(8, reach)
    band = np.zeros((block, block + reach))
    for row in range(block):
        band[row, row : row + len(weights)] = weights
    made = np.empty_like(flat)
    for start in range(0, size, block):
        stop = min(start + block, size)
        np.matmul(band[: stop - start, : stop - start + reach], around[start : stop + reach], out=made[start:stop])
    return made.reshape(values.shape)
