"""EfficientNet-V2-S with a mapper to 16 channels: Stable Cascade's image encoder, whose output is Stage C's latent.

Tan and Le 2021 (arXiv 2104.00298), with the names of the weights that Stability publishes (81.5 MB). Shape letters: B
samples, C channels, H and W height and width.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from daguerre.families.cascade.sizes import FEATURES, STEM, V2_S

_NORM_EPS = 1e-3


class Convolution(nn.Sequential):
    """A convolution without bias, a norm over the batch and, but where it only projects, SiLU."""

    def __init__(self, before: int, after: int, kernel: int, stride: int = 1, groups: int = 1, act: bool = True):
        conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(after, eps=_NORM_EPS), *[nn.SiLU()] * act)


class Excitation(nn.Module):
    """Squeeze-and-excitation: channels are weighted by what their means say."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        means_BC11 = x_BCHW.mean((2, 3), keepdim=True)
        return x_BCHW * self.fc2(nn.functional.silu(self.fc1(means_BC11))).sigmoid()


class Block(nn.Module):
    """A block of layers, added to what comes in where shapes allow."""

    def __init__(self, layers: Sequence[nn.Module], residual: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(*layers)
        self.residual = residual

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = self.block(x_BCHW)
        return x_BCHW + y_BCHW if self.residual else y_BCHW


def _block(kind: str, expand: int, stride: int, before: int, after: int) -> Block:
    wide, residual = before * expand, stride == 1 and before == after
    if kind == "separable":
        layers: list[nn.Module] = [Convolution(before, wide, 1)] if expand > 1 else []
        layers += [Convolution(wide, wide, 3, stride, groups=wide), Excitation(wide, max(1, before // 4))]
        return Block([*layers, Convolution(wide, after, 1, act=False)], residual)
    if expand == 1:
        return Block([Convolution(before, after, 3, stride)], residual)
    return Block([Convolution(before, wide, 3, stride), Convolution(wide, after, 1, act=False)], residual)


def backbone(stem_channels: int, stages: Sequence[Sequence[Any]], feature_channels: int) -> nn.Sequential:
    """The layers of an EfficientNet for RGB images; of each stage the numbers are as in `sizes.V2_S`."""
    layers: list[nn.Module] = [Convolution(3, stem_channels, 3, 2)]
    channels = [stem_channels, *(stage[3] for stage in stages)]
    for (kind, expand, stride, _, count), (before, after) in zip(stages, pairwise(channels), strict=True):
        blocks = [
            _block(kind, expand, 1 if number else stride, after if number else before, after) for number in range(count)
        ]
        layers.append(nn.Sequential(*blocks))
    return nn.Sequential(*layers, Convolution(channels[-1], feature_channels, 1))


class EfficientNetEncoder(ModelMixin, ConfigMixin):
    """Features of an image at a 32nd of its sides, mapped to few channels and whitened by running statistics."""

    @register_to_config
    def __init__(
        self,
        latent_channels: int = 16,
        stem_channels: int = STEM,
        stages: Sequence[Sequence[Any]] = V2_S,
        feature_channels: int = FEATURES,
    ) -> None:
        super().__init__()
        self.backbone = backbone(stem_channels, stages, feature_channels)
        whitening = nn.BatchNorm2d(latent_channels, affine=False)
        self.mapper = nn.Sequential(nn.Conv2d(feature_channels, latent_channels, 1, bias=False), whitening)

    @property
    def stride(self) -> int:
        """Pixels of an image for each cell of its latent: 32 of the published one."""
        stages: Sequence[Sequence[Any]] = self.config["stages"]
        return 2 * prod(int(stage[2]) for stage in stages)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Latents [B, 16, H/32, W/32] of RGB images that were normalised by ImageNet's statistics."""
        return self.mapper(self.backbone(x_BCHW))
