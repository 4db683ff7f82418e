"""Filters that conditions share: a Gaussian blur, and bilinear sampling without a filter before it.

The blur is in float64: the same numbers to the bit on any machine and any number of threads. Sampling is as torch's
`interpolate` and OpenCV's INTER_LINEAR have it; Pillow's resize averages all that a smaller pixel covers, and networks
that were trained on pictures made without that see other pictures of it.
"""

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


def resized(values_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    """[height, width, C] float32 of [H, W, C]."""
    found = values_HWC.astype(np.float32)
    for axis, wanted in ((1, width), (0, height)):
        own = found.shape[axis]
        places = (np.arange(wanted, dtype=np.float32) + np.float32(0.5)) * np.float32(own / wanted) - np.float32(0.5)
        places = np.maximum(places, 0)  # of the centres of the new pixels among the old ones
        before = np.minimum(places.astype(np.int64), own - 1)
        share = np.expand_dims(places - before, [each for each in range(3) if each != axis])
        after = np.minimum(before + 1, own - 1)
        found = np.take(found, before, axis) * (1 - share) + np.take(found, after, axis) * share
    return found


def sampled(values_HWC: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """[..., C] float32: values between the pixels around the points (y, x) [...]; 0 outside of the image."""
    height, width, _ = values_HWC.shape
    top, left = np.floor(y).astype(np.int64), np.floor(x).astype(np.int64)
    down, right = (y - top).astype(np.float32), (x - left).astype(np.float32)
    found = np.zeros((*y.shape, values_HWC.shape[2]), np.float32)
    for rows, share in ((top, 1 - down), (top + 1, down)):
        for columns, part in ((left, 1 - right), (left + 1, right)):
            inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
            weight = np.where(inside, share * part, np.float32(0))[..., None]
            found += weight * values_HWC[rows.clip(0, height - 1), columns.clip(0, width - 1)].astype(np.float32)
    return found
