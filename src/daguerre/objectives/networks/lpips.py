"""LPIPS (Zhang et al. 2018, arXiv 1801.03924), version 0.1 with VGG16: a distance of images as people see it.

Its weights have published names: those of `vgg.pth` of the package lpips (`lin0.model.1.weight` ...) and of
`vgg16-397923af.pth` of torchvision (`features.0.weight` ...), or of the state dict of `lpips.LPIPS(net="vgg")`. Which
files they are in is models/parts/lpips.py.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from daguerre.errors import UserError

CHANNELS = (64, 128, 256, 512, 512)
"""Channels of the five levels of VGG16."""
CONVOLUTIONS = ((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28))
"""Numbers of VGG16's convolutions among torchvision's `features`, by level."""
PUBLISHED = "vgg.pth of the package lpips and vgg16-397923af.pth of torchvision"
# ImageNet's mean and deviation for images in [-1, 1], as in the package's ScalingLayer.
_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)


class Lpips(nn.Module):
    """Two images [B, 3, H, W] in [-1, 1] to distances [B]."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, *CHANNELS)
        self.features = nn.ModuleDict()
        for (before, width), numbers in zip(pairwise(widths), CONVOLUTIONS, strict=True):
            for number in numbers:
                self.features[str(number)] = nn.Conv2d(before if number == numbers[0] else width, width, 3, padding=1)
        self.lin = nn.ModuleList(nn.Conv2d(width, 1, 1, bias=False) for width in CHANNELS)

    def forward(self, first_BCHW: Tensor, second_BCHW: Tensor) -> Tensor:
        total = torch.zeros(len(first_BCHW), device=first_BCHW.device)
        for weigh, a, b in zip(self.lin, self._levels(first_BCHW), self._levels(second_BCHW), strict=True):
            total = total + weigh((_unit(a) - _unit(b)).square()).mean(dim=(1, 2, 3))
        return total

    def _levels(self, x_BCHW: Tensor) -> list[Tensor]:
        # Filled on the device: numbers that are copied to a GPU are waited for.
        shift, scale = (
            torch.stack([x_BCHW.new_full((1, 1), number, dtype=torch.float32) for number in numbers])
            for numbers in (_SHIFT, _SCALE)
        )
        x_BCHW, features = (x_BCHW - shift) / scale, []
        for level, numbers in enumerate(CONVOLUTIONS):
            x_BCHW = functional.max_pool2d(x_BCHW, 2) if level else x_BCHW
            for number in numbers:
                x_BCHW = functional.relu(self.features[str(number)](x_BCHW))
            features.append(x_BCHW)
        return features


def weights(tensors: Mapping[str, Tensor], place: str) -> dict[str, Tensor]:
    """The weights by our names, float32, among published ones. UserError, which names their place, if some lack."""
    known = named(tensors)
    with torch.device("meta"):
        names = Lpips().state_dict().keys()
    if lacking := sorted(names - known.keys()):
        raise UserError(
            f"{place} lacks {len(lacking)} weights, such as {lacking[0]}: it needs {PUBLISHED}", code="missing"
        )
    return {name: known[name].float() for name in names}


def filled(tensors: Mapping[str, Tensor]) -> Lpips:
    """LPIPS with these weights, frozen, on the CPU."""
    with torch.device("meta"):
        # Without memory first: 15 million random weights would be drawn to be overwritten at once.
        net = Lpips()
    net = net.to_empty(device="cpu")
    net.load_state_dict(tensors)
    return net.eval().requires_grad_(False)


def named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by our names, of the published ones; others are left out."""
    patterns: Sequence[tuple[str, str]] = (
        (r"(?:net\.slice\d\.|features\.)(\d+)\.(weight|bias)", r"features.\1.\2"),
        (r"lin(\d)\.model\.1\.weight", r"lin.\1.weight"),
    )
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, ours in patterns:
            if match := re.fullmatch(pattern, name):
                renamed[match.expand(ours)] = tensor
    return renamed


def _unit(x_BCHW: Tensor) -> Tensor:
    return x_BCHW / (x_BCHW.square().sum(dim=1, keepdim=True).sqrt() + 1e-10)  # 1e-10 as in the package
