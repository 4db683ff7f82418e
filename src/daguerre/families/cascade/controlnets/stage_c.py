"""The ControlNet of Stage C of Stable Cascade, with the names of the weights that Stability publishes, and a Stage C
that takes what it adds.

A backbone reads the picture, and a projection for each controlled block makes of that what is added before the block.
Shape letters: B samples, C channels, H and W height and width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.unets.unet_stable_cascade import (
    SDCascadeAttnBlock,
    SDCascadeResBlock,
    SDCascadeTimestepBlock,
    StableCascadeUNet,
)
from torch import Tensor, nn
from torch.nn import functional

from daguerre.families.cascade import batch_norms, efficientnet
from daguerre.families.cascade.sizes import FEATURES, STEM, V2_S
from daguerre.models.controlnets.controlled import Bottleneck, Reads, Residuals
from daguerre.models.network import stands_for

_SLOPE = 0.2


class LayerNorm2d(nn.LayerNorm):
    """A norm over the channels of [B, C, H, W]."""

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return super().forward(x_BCHW.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ControlBlock(nn.Module):
    """Two convolutions, each behind a norm and GELU, added to what comes in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [LayerNorm2d(channels), nn.GELU(), nn.Conv2d(channels, channels, 3, padding=1)]
        self.blocks = nn.Sequential(*layers)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW + self.blocks(x_BCHW)


class StageCControlNet(ModelMixin, ConfigMixin):
    """Residuals [B, width, h, w] for blocks of Stage C, of a picture or of what a latent's size has."""

    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(
        self,
        channels: int = 3,
        blocks: Sequence[int] = (0, 4, 8, 12, 51, 55, 59, 63),
        widths: Sequence[int] = (2048,) * 8,
        bottleneck: Bottleneck = "effnet",
        stem_channels: int = STEM,
        stages: Sequence[Sequence[Any]] = V2_S,
        feature_channels: int = FEATURES,
        wide_channels: int = 16384,
        hidden_channels: int = 1024,
        depth: int = 8,
        reads: Reads = "colour",
        latent_factor: float = 2.0,
    ) -> None:
        """`blocks` and `widths` are numbers and channels of the blocks that get a residual. Of the bottleneck `effnet`
        are stem, stages and features, of `large` wide and hidden channels, depth and features. `reads` says what a
        picture is to it."""
        super().__init__()
        self.gradient_checkpointing = False
        self.backbone: Any
        if bottleneck == "effnet":
            self.backbone = efficientnet.backbone(stem_channels, stages, feature_channels)
            if channels != 3:  # of Stability's form, which pads nothing there
                self.backbone[0][0] = nn.Conv2d(channels, stem_channels, 3, 2, bias=False)
            features = feature_channels
        elif bottleneck == "simple":
            features, wide = channels, 4 * channels
            between = nn.LeakyReLU(_SLOPE)
            layers = [nn.Conv2d(channels, wide, 3, padding=1), between, nn.Conv2d(wide, channels, 3, padding=1)]
            self.backbone = nn.Sequential(*layers)
        else:
            features = feature_channels
            first = [nn.Conv2d(channels, wide_channels, 1), nn.LeakyReLU(_SLOPE)]
            first += [nn.Conv2d(wide_channels, hidden_channels, 1)]
            inner = [ControlBlock(hidden_channels) for _ in range(depth)]
            self.backbone = nn.Sequential(*first, *inner, nn.Conv2d(hidden_channels, features, 1))
        self.projections = nn.ModuleList(_projection(features, width) for width in widths)
        batch_norms.keep(self.backbone)  # in training too, as Stability has it

    def forward(self, x_BCHW: Tensor) -> list[Tensor]:
        """The residuals of `blocks`, in their order."""
        for layer in self.backbone:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x_BCHW = self._gradient_checkpointing_func(layer, x_BCHW)
            else:
                x_BCHW = layer(x_BCHW)
        return [projection(x_BCHW) for projection in self.projections]


def _projection(features: int, width: int) -> nn.Sequential:
    last = nn.Conv2d(features, width, 1, bias=False)
    nn.init.zeros_(last.weight)
    return nn.Sequential(nn.Conv2d(features, features, 1, bias=False), nn.LeakyReLU(_SLOPE), last)


@stands_for(StableCascadeUNet)
class ControlledUNet(StableCascadeUNet):
    """diffusers' network, to which ControlNets may add something before its residual blocks."""

    _added: Any = iter(())

    def forward(self, *given: Any, residuals: Residuals = (), **named: Any) -> Any:
        """As diffusers' network. `residuals` are what is added before each residual block, in the order in which they
        compute; brought to the size of the block's input (bilinear, corners aligned)."""
        self._added = iter(residuals)
        try:
            return super().forward(*given, **named)
        finally:
            self._added = iter(())

    def _down_encode(self, x: Tensor, r_embed: Tensor, clip: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        for i, scaler in enumerate(self.down_downscalers):
            x = self._level(scaler(x), self.down_blocks[i], self.down_repeat_mappers[i], r_embed, clip)
            found.insert(0, x)
        return found

    def _up_decode(self, level_outputs: list[Tensor], r_embed: Tensor, clip: Tensor) -> Tensor:
        x = level_outputs[0]
        for i, scaler in enumerate(self.up_upscalers):
            skip = level_outputs[i] if i else None
            x = scaler(self._level(x, self.up_blocks[i], self.up_repeat_mappers[i], r_embed, clip, skip))
        return x

    def _level(
        self, x: Tensor, blocks: Any, mappers: Any, r_embed: Tensor, clip: Tensor, skip: Tensor | None = None
    ) -> Tensor:
        """The blocks of a level, once more behind each mapper."""
        again: Any = self._gradient_checkpointing_func if self.gradient_checkpointing else None
        again = again if torch.is_grad_enabled() else None
        for mapper in [*mappers, None]:
            for place, block in enumerate(blocks):
                inputs: tuple[Any, ...] = ()
                if isinstance(block, SDCascadeResBlock):
                    beside = skip if place == 0 else None
                    x, inputs = self._controlled(x, beside), () if beside is None else (beside,)
                elif isinstance(block, SDCascadeAttnBlock):
                    inputs = (clip,)
                elif isinstance(block, SDCascadeTimestepBlock):
                    inputs = (r_embed,)
                x = again(block, x, *inputs) if again else block(x, *inputs)
            x = x if mapper is None else mapper(x)
        return x

    def _controlled(self, x: Tensor, skip: Tensor | None) -> Tensor:
        """The input of a residual block: of its skip's size, with what is added there."""
        if skip is not None and x.shape[2:] != skip.shape[2:]:
            x = _resized(x.float(), skip).to(x.dtype)
        added = next(self._added, None)
        return x if added is None else x + _resized(added, x).to(x.dtype)


def _resized(y: Tensor, like: Tensor) -> Tensor:
    if y.shape[2:] == like.shape[2:]:
        return y
    return functional.interpolate(y, like.shape[2:], mode="bilinear", align_corners=True)


def take_residuals(unet: Any) -> None:
    """Lets a Stage C take residuals. What it computes without is as before; names of its weights stay."""
    if type(unet) is StableCascadeUNet:
        unet.__class__ = ControlledUNet


def residual_blocks(unet: Any) -> list[int]:
    """The width of each residual block of a Stage C, in the order in which they compute."""
    return [
        int(block.depthwise.out_channels)
        for blocks in (*unet.down_blocks, *unet.up_blocks)
        for block in blocks
        if isinstance(block, SDCascadeResBlock)
    ]
