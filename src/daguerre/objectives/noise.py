"""The noise of a training batch: standard normal numbers by key, and what is added to them. No noise levels here.

Shape letters: B samples, C channels, h and w height and width.
"""

import numpy as np
import torch
from torch import Tensor

from daguerre import keys as keyed
from daguerre.objectives.settings import NoiseSettings


def noise(settings: NoiseSettings, seed: int, keys: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    """Noise [B, *shape] float32 on the CPU for keys [B, 3]; sample i depends on its own key alone.

    Offset noise is one more normal number a sample and channel (the first of `shape`), or a sample, constant over the
    image: the variance of a channel's mean grows by offset^2.
    """
    noise = keyed.batch_normals(seed, "noise", keys, shape)
    if settings.pyramid:
        noise = _pyramid(settings, noise, seed, keys)
    if settings.offset:
        flat = (shape[0] if settings.offset_per == "channel" else 1,) + (1,) * (len(shape) - 1)
        noise += np.float32(settings.offset) * keyed.batch_normals(seed, "noise/offset", keys, flat)
    return torch.from_numpy(noise)


def perturbation(settings: NoiseSettings, seed: int, keys: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    """Noise [B, *shape] float32 added to that of the network's input alone (Ning et al. 2023, algorithm 1)."""
    drawn = keyed.batch_normals(seed, "noise/perturbation", keys, shape)
    return torch.from_numpy(np.float32(settings.input_perturbation) * drawn)


def _pyramid(settings: NoiseSettings, noise_BChw: np.ndarray, seed: int, keys: np.ndarray) -> np.ndarray:
    """(noise + sum of m_i times coarser noise) / sqrt(1 + sum of m_i^2), m_i = pyramid^i, grids of sides / 2^i.

    Each coarse number fills its block, so every number still has unit variance. Stable Cascade's, Stage B.
    """
    channels, height, width = noise_BChw.shape[1:]
    power = 1.0
    for level in range(1, min(height, width).bit_length()):
        h, w = height >> level, width >> level
        if min(h, w) > settings.pyramid_size:
            continue
        amplitude = settings.pyramid**level
        coarse_BChw = keyed.batch_normals(seed, f"noise/pyramid/{level}", keys, (channels, h, w))
        rows, columns = np.arange(height) * h // height, np.arange(width) * w // width
        noise_BChw = noise_BChw + np.float32(amplitude) * coarse_BChw[:, :, rows[:, None], columns]
        power += amplitude**2
    return noise_BChw * np.float32(power**-0.5)
