"""Scores of an image and the one that it should equal: PSNR, and SSIM (Wang et al. 2004, IEEE TIP 13)."""

import numpy as np

EQUAL_DB = 100.0
"""PSNR of equal images, whose ratio is infinite."""
_SIGMA, _RADIUS = 1.5, 5
_C1, _C2 = (0.01 * 255.0) ** 2, (0.03 * 255.0) ** 2


def psnr(first_HWC: np.ndarray, second_HWC: np.ndarray) -> float:
    """10 log10(255^2 / mean squared error) in dB of two uint8 images of one size, over all pixels and channels; at most
    `EQUAL_DB`."""
    error = float(np.square(first_HWC.astype(np.float64) - second_HWC.astype(np.float64)).mean())
    return EQUAL_DB if error == 0 else min(EQUAL_DB, float(10 * np.log10(255.0**2 / error)))


def ssim(first_HWC: np.ndarray, second_HWC: np.ndarray) -> float:
    """Structural similarity in [-1, 1] of two uint8 images of one size, of 11 pixels a side at least: Gaussian window
    of 11 pixels (sigma 1.5), K1 = .01, K2 = .03, mean over channels and all places where the window fits."""
    assert min(first_HWC.shape[:2]) > 2 * _RADIUS, "the window has 11 pixels a side"
    a, b = first_HWC.astype(np.float64), second_HWC.astype(np.float64)
    mean_a, mean_b = _smoothed(a), _smoothed(b)
    var_a, var_b = _smoothed(a * a) - mean_a**2, _smoothed(b * b) - mean_b**2
    both = _smoothed(a * b) - mean_a * mean_b
    above = (2 * mean_a * mean_b + _C1) * (2 * both + _C2)
    return float((above / ((mean_a**2 + mean_b**2 + _C1) * (var_a + var_b + _C2))).mean())


def _smoothed(values_HWC: np.ndarray) -> np.ndarray:
    """Weighted means where the window fits: [H - 10, W - 10, C]."""
    offsets = np.arange(-_RADIUS, _RADIUS + 1)
    weights = np.exp(-0.5 * (offsets / _SIGMA) ** 2)
    weights /= weights.sum()
    for dim in (0, 1):
        count = values_HWC.shape[dim] - 2 * _RADIUS
        values_HWC = sum(w * values_HWC.take(range(i, i + count), axis=dim) for i, w in enumerate(weights))
    return values_HWC
