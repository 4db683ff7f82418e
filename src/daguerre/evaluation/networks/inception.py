"""The Inception network of FID: `inception-2015-12-05` of TensorFlow (Szegedy et al. 2015, arXiv 1512.00567).

Reads its weights by the names and shapes of the published files: `pt_inception-2015-12-05-6726825d.pth` (pytorch-fid)
and `weights-inception-2015-12-05-6726825d.pth` (torch-fidelity), or the same in safetensors. It differs from
torchvision's network: average pools leave their padding out, and the last block pools by the maximum. Features are the
2048 of the last average pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from daguerre import digests, keys
from daguerre.errors import UserError
from daguerre.evaluation.networks.place import NetworkPlace, file_of, short
from daguerre.evaluation.networks.resize import POLICIES, Policy
from daguerre.models.weights import files, pickled

SIDE_PX = 299
FEATURES = 2048
PUBLISHED = "pt_inception-2015-12-05-6726825d.pth"
SIZE_BYTES = 96_000_000
_SHA256 = "6726825d"
"""First digits of the published file, which its name has."""
_RANDOM_SEED = 0

Steps = Sequence[Any]
"""Of a branch: ("average" or "max", stride) for pools, (name, channels, kernel, stride) for convolutions, and a list
of such for a fork whose ends stand side by side."""


class ConvNorm(nn.Module):
    """Convolution without bias, batch norm, ReLU. A stride of 2 leaves the border out."""

    def __init__(self, channels: int, out: int, kernel: int | tuple[int, int], stride: int, padding: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return functional.relu(self.bn(self.conv(x_BCHW)))


class Block(nn.Module):
    """Branches side by side."""

    def __init__(self, channels: int, branches: Sequence[Steps]) -> None:
        super().__init__()
        self.branches = branches
        self.channels = sum(self._add(channels, branch) for branch in branches)

    def _add(self, channels: int, steps: Steps) -> int:
        """Adds the convolutions of a branch; returns its channels."""
        for step in steps:
            if isinstance(step, list):
                return sum(self._add(channels, [one]) for one in step)
            if step[0] not in ("average", "max"):
                name, out, kernel, stride = (*step, 1)[:4]
                sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
                padding = tuple(side // 2 for side in sides) if stride == 1 else 0
                self.add_module(name, ConvNorm(channels, out, kernel, stride, padding))
                channels = out
        return channels

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return torch.cat([self._through(x_BCHW, branch) for branch in self.branches], dim=1)

    def _through(self, x_BCHW: Tensor, steps: Steps) -> Tensor:
        for step in steps:
            if isinstance(step, list):
                return torch.cat([self._through(x_BCHW, [one]) for one in step], dim=1)
            if step[0] == "average":
                x_BCHW = functional.avg_pool2d(x_BCHW, 3, 1, 1, count_include_pad=False)
            elif step[0] == "max":
                x_BCHW = functional.max_pool2d(x_BCHW, 3, step[1], padding=1 if step[1] == 1 else 0)
            else:
                x_BCHW = self.get_submodule(step[0])(x_BCHW)
        return x_BCHW


def _a(pooled: int) -> list[Steps]:
    return [
        [("branch1x1", 64, 1)],
        [("branch5x5_1", 48, 1), ("branch5x5_2", 64, 5)],
        [("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3)],
        [("average",), ("branch_pool", pooled, 1)],
    ]


def _c(inner: int) -> list[Steps]:
    across, down = (1, 7), (7, 1)
    double = [(f"branch7x7dbl_{i}", inner, (down, across)[i % 2]) for i in (2, 3, 4)]
    return [
        [("branch1x1", 192, 1)],
        [("branch7x7_1", inner, 1), ("branch7x7_2", inner, across), ("branch7x7_3", 192, down)],
        [("branch7x7dbl_1", inner, 1), *double, ("branch7x7dbl_5", 192, across)],
        [("average",), ("branch_pool", 192, 1)],
    ]


def _e(pool: tuple[Any, ...]) -> list[Steps]:
    across, down = (1, 3), (3, 1)
    fork = [("branch3x3_2a", 384, across), ("branch3x3_2b", 384, down)]
    double = [("branch3x3dbl_3a", 384, across), ("branch3x3dbl_3b", 384, down)]
    return [
        [("branch1x1", 320, 1)],
        [("branch3x3_1", 384, 1), fork],
        [("branch3x3dbl_1", 448, 1), ("branch3x3dbl_2", 384, 3), double],
        [pool, ("branch_pool", 192, 1)],
    ]


_B: list[Steps] = [
    [("branch3x3", 384, 3, 2)],
    [("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3, 2)],
    [("max", 2)],
]
_D: list[Steps] = [
    [("branch3x3_1", 192, 1), ("branch3x3_2", 320, 3, 2)],
    [
        *[("branch7x7x3_1", 192, 1), ("branch7x7x3_2", 192, (1, 7)), ("branch7x7x3_3", 192, (7, 1))],
        ("branch7x7x3_4", 192, 3, 2),
    ],
    [("max", 2)],
]
_MIXED: dict[str, list[Steps]] = {
    "Mixed_5b": _a(32),
    "Mixed_5c": _a(64),
    "Mixed_5d": _a(64),
    "Mixed_6a": _B,
    "Mixed_6b": _c(128),
    "Mixed_6c": _c(160),
    "Mixed_6d": _c(160),
    "Mixed_6e": _c(192),
    "Mixed_7a": _D,
    "Mixed_7b": _e(("average",)),
    "Mixed_7c": _e(("max", 1)),
}


class Inception(nn.Module):
    """[B, 3, 299, 299] in [-1, 1] to [B, 2048]."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = ConvNorm(3, 32, 3, 2, 0)
        self.Conv2d_2a_3x3 = ConvNorm(32, 32, 3, 1, 0)
        self.Conv2d_2b_3x3 = ConvNorm(32, 64, 3, 1, 1)
        self.Conv2d_3b_1x1 = ConvNorm(64, 80, 1, 1, 0)
        self.Conv2d_4a_3x3 = ConvNorm(80, 192, 3, 1, 0)
        channels = 192
        for name, branches in _MIXED.items():
            block = Block(channels, branches)
            self.add_module(name, block)
            channels = block.channels

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x_BCHW)))
        x_BCHW = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(functional.max_pool2d(x_BCHW, 3, 2)))
        x_BCHW = functional.max_pool2d(x_BCHW, 3, 2)
        for name in _MIXED:
            x_BCHW = self.get_submodule(name)(x_BCHW)
        return functional.adaptive_avg_pool2d(x_BCHW, 1).flatten(1)


@dataclass(frozen=True, eq=False)
class Network:
    """The network with its weights, on a device."""

    net: Inception
    digest: str
    random: bool
    resize: Policy
    device: torch.device

    @property
    def label(self) -> str:
        return f"{'random-' * self.random}inception-{short(self.digest)}-{self.resize}"

    @property
    def about(self) -> dict[str, Any]:
        weights = "" if self.digest.startswith(_SHA256) else ", weights that are not the published file's"
        return {
            "network": f"inception-2015-12-05{', random weights' if self.random else weights}",
            "digest": self.digest,
            "resize": self.resize,
        }

    @torch.inference_mode()
    def compute(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """[n, 2048] float32 of images [H, W, 3] uint8: all of them at once."""
        x_BCHW = torch.stack([POLICIES[self.resize](image, SIDE_PX) for image in images])
        # pytorch-fid's 2x/255 - 1; the others' (x - 128)/128
        scaled = x_BCHW / 127.5 - 1 if self.resize == "torch" else (x_BCHW - 128) / 128
        found: Tensor = self.net(scaled.to(self.device))
        return found.float().cpu().numpy()


def load(place: NetworkPlace, device: torch.device, resize: Policy) -> Network:
    """The network of a place: a file, or `random`. UserError for a file that is missing or holds other weights."""
    with torch.device("meta"):
        net = Inception()
    if place.path == "random":
        tensors = random_weights(net)
        digest = place.checked(digests.of_tensors(tensors))
    else:
        path, digest = file_of(place, "inception", PUBLISHED, SIZE_BYTES)
        read = files.read_file if path.suffix == ".safetensors" else pickled.tensors
        tensors = _known(read(path), net, str(path))
    net = net.to_empty(device="cpu")
    net.load_state_dict(tensors, strict=True)
    return Network(net.eval().requires_grad_(False).to(device), digest, place.path == "random", resize, device)


def _known(tensors: dict[str, Tensor], net: Inception, where: str) -> dict[str, Tensor]:
    """The weights of the network among those of a file. The classifier (`fc`) is not used; the count of batches that
    trained a norm is in some files."""
    wanted = net.state_dict()
    missing = [name for name in wanted if name not in tensors and not name.endswith("num_batches_tracked")]
    odd = [name for name in tensors if name not in wanted and not name.startswith(("fc.", "AuxLogits."))]
    shapes = [name for name in wanted if name in tensors and tensors[name].shape != wanted[name].shape]
    for names, what in ((missing, "lacks"), (odd, "has unknown"), (shapes, "has other shapes of")):
        if names:
            raise UserError(
                f"{where} is not the Inception network of FID: it {what} {len(names)} weights, such as {names[0]}. "
                f"Use {PUBLISHED} of pytorch-fid, or weights-inception-2015-12-05-6726825d.pth of torch-fidelity",
                code="unsupported",
            )
    return {name: tensors.get(name, torch.zeros((), dtype=torch.long)) for name in wanted}


def random_weights(net: Inception) -> dict[str, Tensor]:
    """Weights without training, drawn by their names: of a convolution with the variance 2 / inputs (He et al. 2015),
    norms as they begin. Distances of their features order images, but compare with nothing published."""
    found: dict[str, Tensor] = {}
    for name, tensor in net.state_dict().items():
        if name.endswith("conv.weight"):
            inputs = tensor[0].numel()
            drawn = keys.normals(_RANDOM_SEED, f"random inception {name}", 0, count=tensor.numel())
            found[name] = torch.from_numpy(drawn * np.float32((2 / inputs) ** 0.5)).reshape(tensor.shape)
        else:
            usual = torch.ones if name.endswith(("bn.weight", "running_var")) else torch.zeros
            found[name] = usual(tensor.shape, dtype=tensor.dtype)
    return found
