"""The middle of what an image shows, around which smart crops are cut.

With a file of weights it is that of Stability's training of Stable Cascade (torchtools' SmartCrop): the cells of a
small network's map whose softmax at 0.03 is above three quarters of the largest, and their centroid. Without one it is
the centroid of the cells whose colour is more than twice as far from the image's mean colour as the mean cell's
(Achanta et al. 2009, CVPR). Shape letters: C channels, H and W height and width.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from daguerre.errors import UserError
from daguerre.regular import check_regular
from daguerre.threads import made_once

_REFUSED: Any = torch.serialization.pickle.UnpicklingError
_TEMPERATURE, _SHARE_OF_MOST = 0.03, 0.75
_NETWORK_PX, _COLOURS_PX = 240, 64
"""Shorter sides at which the maps are made."""
_ABOVE_MEAN = 2.0
_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
_WHITE = (0.95047, 1.0, 1.08883)
"""From linear sRGB to XYZ, and D65's white (IEC 61966-2-1)."""


@torch.no_grad()
def middle(pixels_HWC: np.ndarray, weights: str | None) -> tuple[float, float]:
    """Vertical and horizontal place, each in [0, 1], in an image [H, W, 3] uint8. UserError for another file of
    weights."""
    x_CHW = torch.from_numpy(np.ascontiguousarray(pixels_HWC)).permute(2, 0, 1)
    map_HW = _unlike(_small(x_CHW, _COLOURS_PX)) if weights is None else _learnt(_small(x_CHW, _NETWORK_PX), weights)
    if not map_HW.any():
        return 0.5, 0.5
    total = map_HW.sum()
    down_H, right_W = (torch.linspace(0, 1, length, dtype=torch.float64) for length in map_HW.shape)
    return float((map_HW.sum(1) * down_H).sum() / total), float((map_HW.sum(0) * right_W).sum() / total)


def _small(x_CHW: Tensor, side_px: int) -> Tensor:
    """RGB in [0, 1], float32, with this shorter side."""
    height, width = x_CHW.shape[1:]
    scale = side_px / min(height, width)
    size = [max(side_px, round(length * scale)) for length in (height, width)]
    return functional.interpolate(x_CHW[None], size, mode="bilinear", antialias=True)[0].float() / 255


def _learnt(x_CHW: Tensor, weights: str) -> Tensor:
    """Cells that count, 1 or 0 in float64, by the network."""
    map_HW = _network(weights)(x_CHW[None])[0, 0].double()
    shares_HW = torch.exp((map_HW - map_HW.max()) / _TEMPERATURE)
    return (shares_HW > _SHARE_OF_MOST).double()


def _unlike(x_CHW: Tensor) -> Tensor:
    """The same by the distance of colours in CIELAB."""
    lab_CHW = _lab(x_CHW.double())
    distance_HW = (lab_CHW - lab_CHW.mean((1, 2), keepdim=True)).square().sum(0).sqrt()
    return (distance_HW > _ABOVE_MEAN * distance_HW.mean()).double()


def _lab(x_CHW: Tensor) -> Tensor:
    """CIELAB of sRGB in [0, 1]."""
    linear_CHW = torch.where(x_CHW <= 0.04045, x_CHW / 12.92, ((x_CHW + 0.055) / 1.055) ** 2.4)
    white_C11 = x_CHW.new_tensor(_WHITE)[:, None, None]
    ratio_CHW = torch.einsum("ij,jhw->ihw", x_CHW.new_tensor(_XYZ), linear_CHW) / white_C11
    edge = 6 / 29
    x, y, z = torch.where(ratio_CHW > edge**3, ratio_CHW ** (1 / 3), ratio_CHW / (3 * edge**2) + 4 / 29)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@made_once(4)
def _network(weights: str) -> nn.Module:
    network = Saliency().eval().requires_grad_(False)
    try:
        check_regular(Path(weights))
        is_safe = weights.endswith(".safetensors")
        state = load_file(weights) if is_safe else torch.load(weights, map_location="cpu", weights_only=True)
        network.load_state_dict(state)
    except (OSError, RuntimeError, ValueError, AttributeError, TypeError, _REFUSED) as error:
        raise UserError(
            f"data.saliency={weights} is no file of the saliency network of Stability's code (saliency_model.pt): "
            f"{str(error).splitlines()[0]}",
            code="damaged",
            setting="data.saliency",
        ) from error
    return network


class Saliency(nn.Module):
    """RGB in [0, 1], [B, 3, H, W], to a map [B, 1, about H / 8, W / 8] in (0, 1); names as in Stability's file."""

    def __init__(self) -> None:
        super().__init__()
        down: list[nn.Module] = []
        for before, after, kernel, stride in ((3, 8, 9, 4), (8, 16, 3, 2), (16, 32, 3, 2)):
            down += [*_padded(before, after, kernel, stride), nn.InstanceNorm2d(after, affine=True), nn.ReLU()]
        self.downsampler = nn.Sequential(*down)
        wider = nn.Conv2d(32, 64, 1, bias=False, groups=32)
        self.residual = nn.Sequential(_Residual(32), wider, _Residual(64))
        self.segmentator = nn.Sequential(
            *_padded(64, 16, 3), nn.InstanceNorm2d(16, affine=True), nn.ReLU(),
            nn.Upsample(scale_factor=2, mode="nearest"), *_padded(16, 1, 9), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.segmentator(self.residual(self.downsampler(x_BCHW)))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = [*_padded(channels, channels, 3), nn.InstanceNorm2d(channels, affine=True), nn.ReLU()]
        layers += [*_padded(channels, channels, 3), nn.InstanceNorm2d(channels, affine=True)]
        self.resblock = nn.Sequential(*layers)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW + self.resblock(x_BCHW)


def _padded(before: int, after: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [nn.ReflectionPad2d(kernel // 2), nn.Conv2d(before, after, kernel, stride)]
