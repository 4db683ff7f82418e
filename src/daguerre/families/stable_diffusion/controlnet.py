"""ControlNets of UNets, diffusers' ControlNetModel: a copy of the UNet's first half, with an embedding of the control
image before it and convolutions that start at zero behind it. What they give goes to the UNet's skips and, last, to its
middle block.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from diffusers import ControlNetModel
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.models.controlnets.controlled import Size
from daguerre.models.family import ImageCodec
from daguerre.models.hosts import host

_EMBEDDING = (16, 32, 96, 256)
"""Channels of the control image's embedding for an autoencoder that shrinks sides by 8."""


def factor_of(images: ImageCodec) -> int:
    """The number by which the sides of a latent are smaller than the image's."""
    side = 1 << 10
    return side // images.latent_shape((3, side, side))[1]


def embedding_channels(factor: int) -> tuple[int, ...]:
    """Channels of the embedding for this factor: it halves the picture once between two of them, so that the picture
    arrives in the latent's size. For 8 they are those of the paper, for less its first ones. UserError for a factor
    that is no power of two."""
    halvings = factor.bit_length() - 1
    if factor != 1 << halvings:
        raise UserError(
            f"a ControlNet halves the picture until it has the latent's size, so the autoencoder must shrink images by "
            f"a power of two, not by {factor}",
            code="unsupported",
        )
    return (_EMBEDDING + _EMBEDDING[-1:] * halvings)[: halvings + 1]


def numbers(unet: Any, embedding: Sequence[int], size: Size = "large") -> dict[str, Any]:
    """Numbers of the ControlNetModel that fits a UNet, as `ControlNetModel.from_unet` takes them over."""
    given = signature(ControlNetModel.__init__).parameters
    found = {name: value for name, value in unet.config.items() if name in given}
    found["conditioning_embedding_out_channels"] = tuple(embedding)
    n_levels = len(found["block_out_channels"])
    if size == "mid":
        found["transformer_layers_per_block"] = [0] * (n_levels - 1) + [1]
    if size == "small":
        found["transformer_layers_per_block"] = [0] * n_levels
        found["down_block_types"] = ["DownBlock2D"] * n_levels
    return found


def weights_of(unet: Any) -> dict[str, Tensor]:
    """The UNet's weights by its own names, without what adapters have added."""
    return {host(name)[0]: tensor for name, tensor in unet.state_dict().items() if not host(name)[1]}


@torch.no_grad()
def copy_from(unet: Any, network: nn.Module) -> None:
    """Copies the UNet's weights to where the ControlNet has the same layers."""
    own = weights_of(unet)
    for name, tensor in network.state_dict().items():
        if shared(name):
            tensor.copy_(own[name])


def shared(name: str) -> bool:
    """True of tensors that a ControlNet has in common with its UNet."""
    return not name.startswith("controlnet_")
