"""The noise of a training batch: standard normal numbers by key, and what is added to them. No noise levels here."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from daguerre import keys as keyed
from daguerre.objectives.settings import NoiseSettings


def noise(settings: NoiseSettings, seed: int, keys: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    """Noise [B, *shape] float32 on the CPU for keys [B, 3]; sample i depends on its own key alone.

    Offset noise is one more normal number a sample and channel (the first of `shape`), constant over the picture:
    the variance of a channel's mean grows by offset^2.
    """
    noise = keyed.batch_normals(seed, "noise", keys, shape)
    if settings.offset:
        flat = (shape[0],) + (1,) * (len(shape) - 1)
        noise += np.float32(settings.offset) * keyed.batch_normals(seed, "noise/offset", keys, flat)
    return torch.from_numpy(noise)
