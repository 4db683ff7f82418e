"""The ways in which codes bring images to the size of a feature network: features, and so FID, differ with them.

| policy | filter | code |
|---|---|---|
| `tensorflow` | bilinear, TensorFlow 1's grid, without antialias | the original FID, torch-fidelity |
| `torch` | bilinear, half-pixel centres, without antialias | pytorch-fid |
| `antialias` | bilinear, half-pixel centres, antialiased | torchmetrics' default |
| `pillow_bicubic` | bicubic, antialiased, each channel in float32 and clipped to 0..255 | clean-fid |

Each takes an image [H, W, 3] uint8 and a side, and gives [3, side, side] float32 in 0..255. The aspect ratio is not
kept: crop before.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

Policy = Literal["tensorflow", "torch", "antialias", "pillow_bicubic"]


def tensorflow(pixels_HWC: np.ndarray, side: int) -> Tensor:
    """Pixel i of the result is read at i * size / side: the first row stays the first, the last ones are repeated."""
    x_CHW = torch.from_numpy(pixels_HWC).permute(2, 0, 1).float()
    for dim in (1, 2):
        size = x_CHW.shape[dim]
        places = torch.arange(side, dtype=torch.float32) * (size / side)
        low = places.floor().long()
        high = (low + 1).clamp(max=size - 1)
        share = (places - low).reshape(-1, 1) if dim == 1 else places - low
        first, second = x_CHW.index_select(dim, low), x_CHW.index_select(dim, high)
        x_CHW = first + (second - first) * share
    return x_CHW


def plain(pixels_HWC: np.ndarray, side: int) -> Tensor:
    return _interpolated(pixels_HWC, side, antialias=False)


def antialias(pixels_HWC: np.ndarray, side: int) -> Tensor:
    return _interpolated(pixels_HWC, side, antialias=True)


def pillow_bicubic(pixels_HWC: np.ndarray, side: int) -> Tensor:
    def resized(channel_HW: np.ndarray) -> np.ndarray:
        image = Image.fromarray(channel_HW.astype(np.float32))
        return np.asarray(image.resize((side, side), Image.Resampling.BICUBIC)).clip(0, 255)

    return torch.from_numpy(np.stack([resized(pixels_HWC[:, :, channel]) for channel in range(3)]))


POLICIES: Mapping[Policy, Callable[[np.ndarray, int], Tensor]] = MappingProxyType(
    {"tensorflow": tensorflow, "torch": plain, "antialias": antialias, "pillow_bicubic": pillow_bicubic}
)


def _interpolated(pixels_HWC: np.ndarray, side: int, antialias: bool) -> Tensor:
    x_BCHW = torch.from_numpy(pixels_HWC).permute(2, 0, 1)[None].float()
    size = (side, side)
    return functional.interpolate(x_BCHW, size, mode="bilinear", align_corners=False, antialias=antialias)[0]
