"""LPIPS (Zhang et al. 2018, arXiv 1801.03924), version 0.1 with VGG16: a distance of images as people see it.

Reads its weights by published names: `vgg.pth` of the package lpips (`lin0.model.1.weight` ...) and
`vgg16-397923af.pth` of torchvision (`features.0.weight` ...), both in one folder; or one file that holds both, such as
the state dict of `lpips.LPIPS(net="vgg")`.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from daguerre import digests
from daguerre.errors import UserError
from daguerre.models.pixel_codec import channels
from daguerre.models.weights import files, pickled

CHANNELS = (64, 128, 256, 512, 512)
"""Of the five levels of VGG16."""
CONVOLUTIONS = ((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28))
"""Numbers of its convolutions among torchvision's `features`, by level."""
PUBLISHED = "vgg.pth of the package lpips and vgg16-397923af.pth of torchvision"
_TRUNK_SHA256 = "397923af"
"""First digits of torchvision's file, which its name has."""
_LIN_SHA256 = "05bddf2a99783f1974778be82de9f9a2832bc90e839809e74ba5cf44339c028a"
"""`digests.of_tensors` of the weights of version 0.1."""
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
        shift, scale = (channels(values, x_BCHW.new_empty(0, dtype=torch.float32)) for values in (_SHIFT, _SCALE))
        x_BCHW, found = (x_BCHW - shift) / scale, []
        for level, numbers in enumerate(CONVOLUTIONS):
            x_BCHW = functional.max_pool2d(x_BCHW, 2) if level else x_BCHW
            for number in numbers:
                x_BCHW = functional.relu(self.features[str(number)](x_BCHW))
            found.append(x_BCHW)
        return found


class Weights(NamedTuple):
    """The weights of a place."""

    tensors: dict[str, Tensor]
    """float32, by our names."""
    digest: str
    """SHA-256 of them."""
    published: bool
    """They are known to be the published ones: of the trunk by the digest of torchvision's own file. In a file of
    another form they may be, too."""


def read(place: str) -> Weights | None:
    """The weights of a folder or file; None where there is no file. UserError where it holds something else."""
    path = Path(place).expanduser()
    found = sorted(path.glob("*.pth")) + sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not found or not found[0].is_file():
        return None
    tensors: dict[str, Tensor] = {}
    trunk = any(digests.sha256([each]).startswith(_TRUNK_SHA256) for each in found)
    for each in found:
        opened = files.read_file if each.suffix == ".safetensors" else pickled.tensors
        tensors |= named(opened(each))
    with torch.device("meta"):
        names = Lpips().state_dict().keys()
    if lacking := sorted(names - tensors.keys()):
        raise UserError(
            f"{place} lacks {len(lacking)} weights, such as {lacking[0]}: it needs {PUBLISHED}", code="missing"
        )
    wanted = {name: tensors[name].float() for name in names}
    lin = digests.of_tensors({name: tensor for name, tensor in wanted.items() if name.startswith("lin.")})
    return Weights(wanted, digests.of_tensors(wanted), trunk and lin == _LIN_SHA256)


def filled(tensors: Mapping[str, Tensor]) -> Lpips:
    """LPIPS with these weights, frozen, on the CPU."""
    with torch.device("meta"):
        net = Lpips()
    net = net.to_empty(device="cpu")
    net.load_state_dict(tensors)
    return net.eval().requires_grad_(False)


def named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by our names, of the published ones; others are left out."""
    patterns: Sequence[tuple[str, str]] = (
        (r"(?:net\.slice\d\.|features\.)(\d+)\.(weight|bias)", r"features.\1.\2"),
        (r"lin(\d)\.model\.1\.weight", r"lin.\1.weight"),
    )
    found = {}
    for name, tensor in tensors.items():
        for pattern, ours in patterns:
            if match := re.fullmatch(pattern, name):
                found[match.expand(ours)] = tensor
    return found


def _unit(x_BCHW: Tensor) -> Tensor:
    return x_BCHW / (x_BCHW.square().sum(dim=1, keepdim=True).sqrt() + 1e-10)
