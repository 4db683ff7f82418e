"""ControlNets: networks beside a frozen UNet that add what they read in a control image to its skips (Zhang et al.
2023, arXiv 2302.05543).

The network is diffusers' ControlNetModel: a copy of the UNet's first half, with an embedding of the control image
before it and convolutions that start at zero behind it. Reads and compares files of any layout through
models/controlnet_files.

Shape letters: B samples, C channels, H and W height and width, R residuals: those of the down blocks and, last, that
of the middle block.
"""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, Literal, get_args

import torch
from diffusers import ControlNetModel
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.models.family import Family
from daguerre.models.sharding_axes import host
from daguerre.models.unet import UNet
from daguerre.types import Cond

Size = Literal["large", "mid", "small"]
"""large: as many transformer blocks as the UNet; mid: one at each place of the deepest level alone; small: none."""
SIZES: tuple[Size, ...] = get_args(Size)
_EMBEDDING = (16, 32, 96, 256)
"""Channels of the control image's embedding for an autoencoder that shrinks sides by 8."""


class Controlled(nn.Module):
    """A UNet with a ControlNet beside it, as the net of a family. Of several, each stands around the one before: their
    residuals are added up."""

    def __init__(self, inner: nn.Module, name: str, network: nn.Module, scale: float, components: Mapping[str, Any]):
        """`inner` is the family's net, or one with a ControlNet. `name` is that of the ControlNet in the state and in
        the conditioning, `components` are frozen networks that are part of the state beside it."""
        super().__init__()
        for other, module in {**components, **dict(inner.named_children()), name: network}.items():
            self.add_module(other, module)
        self._own: Any = (inner, network)  # in a tuple: both are registered here, under the names of the state
        self.name, self.scale = name, scale

    @property
    def inner(self) -> Any:
        """The net around which it stands."""
        return self._own[0]

    @property
    def network(self) -> Any:
        """The ControlNet."""
        return self._own[1]

    def forward(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> Tensor:
        """The prediction y [B, C, H, W]. cond[NAME] [B, 3, h, w] is the control image, in pixels; see also `scales`."""
        return self.denoise(x_BCHW, c_noise_B, self.features(cond))

    def features(self, cond: Cond) -> Cond:
        """As the inner net."""
        found: Cond = self.inner.features(cond)
        return found

    def denoise(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Sequence[Tensor] = ()) -> Tensor:
        """The prediction, with further residuals."""
        added = {"text_embeds": cond["pooled"], "time_ids": cond["sizes"]} if "sizes" in cond else None
        scales_BR = cond.get(scales(self.name))
        down, middle = self.network(
            x_BCHW,
            c_noise_B,
            encoder_hidden_states=cond["text"],
            controlnet_cond=cond[self.name],
            conditioning_scale=self.scale if scales_BR is None else 1.0,
            added_cond_kwargs=added,
            return_dict=False,
        )
        own = [*down, middle]
        if scales_BR is not None:
            low_B, high_B = cond[levels(self.name)].unbind(1)
            factors_BR = scales_BR * ((c_noise_B >= low_B) & (c_noise_B <= high_B))[:, None]
            own = [y * factors_BR[:, i, None, None, None].to(y.dtype) for i, y in enumerate(own)]
        whole = [a + b for a, b in zip(own, residuals, strict=True)] if residuals else own
        prediction: Tensor = self.inner.denoise(x_BCHW, c_noise_B, cond, whole)
        return prediction


def beside(net: nn.Module) -> list[Controlled]:
    """The ControlNets of a net, in the order in which they were put there."""
    return [*beside(net.inner), net] if isinstance(net, Controlled) else []


def scales(name: str) -> str:
    """The conditioning [B, R] by which each residual of this ControlNet is multiplied, in place of its usual scale."""
    return f"{name}.scales"


def levels(name: str) -> str:
    """The conditioning [B, 2], beside `scales`: the lowest and the highest c_noise at which the ControlNet acts."""
    return f"{name}.levels"


def unet_of(family: Family) -> tuple[str, Any]:
    """Name and network of the UNet that a ControlNet can be put beside. UserError for families without one."""
    found = [name for name, spec in family.specs.items() if spec.role == "denoiser"]
    if not found or not isinstance(family.net, UNet | Controlled):
        raise UserError(
            "a ControlNet cannot be used here: it needs a UNet with cross attention, as Stable Diffusion and SDXL have",
            code="unsupported",
        )
    return found[0], family.components[found[0]]


def factor_of(family: Family) -> int:
    """The number by which the sides of a latent are smaller than the image's."""
    side = 1 << 10
    return side // family.latent_shape((3, side, side))[1]


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


def zeroed(network: nn.Module) -> list[str]:
    """The weights that start at zero, by which a new ControlNet leaves the UNet's output as it is."""
    ends = ("controlnet_down_blocks.", "controlnet_mid_block.", "controlnet_cond_embedding.conv_out.")
    return [name for name in network.state_dict() if name.startswith(ends)]


def residual_count(network: Any) -> int:
    """R."""
    return len(network.controlnet_down_blocks) + 1


def hint(pixels_BCHW: Tensor) -> Tensor:
    """A picture [B, 3 or 4, H, W] uint8 as a ControlNet reads it: RGB [B, 3, H, W] float32 in [0, 1], and -1 where it
    is transparent (less than half opaque): nothing is known there, as ControlNets for inpainting have it."""
    rgb_BCHW = pixels_BCHW[:, :3].float() / 255
    if pixels_BCHW.shape[1] == 3:
        return rgb_BCHW
    return torch.where(pixels_BCHW[:, 3:] < 128, -1.0, rgb_BCHW)
