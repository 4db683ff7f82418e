"""diffusers' AutoencoderKLQwenImage and AutoencoderKLQwenImage21: autoencoders of videos, of which an image is one
frame.

Shape letters: B samples, C channels, H and W height and width.
"""

import re
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLQwenImage21
from torch import Tensor

from daguerre.models.parts.latent_network import LatentNetwork
from daguerre.models.weights.original_names import FileNames, Link

_ENDS = {
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
    **{f"{half}.conv_in": f"{half}.conv1" for half in ("encoder", "decoder")},
    **{f"{half}.norm_out": f"{half}.head.0" for half in ("encoder", "decoder")},
    **{f"{half}.conv_out": f"{half}.head.2" for half in ("encoder", "decoder")},
}
_MIDDLE = {"mid_block.resnets.0": "middle.0", "mid_block.attentions.0": "middle.1", "mid_block.resnets.1": "middle.2"}
_RESIDUAL = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}
_RESIDUAL |= {"conv_shortcut": "shortcut"}
_UP = re.compile(r"up_blocks\.(\d+)\.(?:resnets\.(\d+)|upsamplers\.0)\.(.+)")


class _Names(FileNames):
    """Wan's names, which number the layers on the way up through, and call those of a residual block by their place."""

    def links_in(self, held: Collection[str], names: Iterable[str]) -> tuple[str, list[Link]]:
        """No prefix, and a link for each tensor."""
        names = [*names]
        # Each block on the way up has so many residual blocks, and something that enlarges behind them.
        count = 1 + max((int(match[2] or 0) for name in names if (match := _UP.search(name))), default=0)
        return "", [Link(_original(name, count), (name,)) for name in names]


def _original(name: str, count: int) -> str:
    layer, _, tensor = name.rpartition(".")
    if layer in _ENDS:
        return f"{_ENDS[layer]}.{tensor}"
    half, _, inside = layer.partition(".")
    if match := _UP.fullmatch(inside):
        number = int(match[1]) * (count + 1) + (count if match[2] is None else int(match[2]))
        return f"{half}.upsamples.{number}.{_RESIDUAL.get(match[3], match[3])}.{tensor}"
    if inside.startswith("down_blocks."):
        _, place, part = inside.split(".", 2)
        return f"{half}.downsamples.{place}.{_RESIDUAL.get(part, part)}.{tensor}"
    block = next(each for each in _MIDDLE if inside.startswith(f"{each}."))
    part = inside.removeprefix(f"{block}.")
    return f"{half}.{_MIDDLE[block]}.{_RESIDUAL.get(part, part)}.{tensor}"


class QwenImageVAE(LatentNetwork):
    """Qwen-Image's autoencoder. Its config has the statistics of each channel."""

    library: ClassVar[Any] = AutoencoderKLQwenImage
    memory_format = torch.contiguous_format  # convolutions of videos have five dims
    names: ClassVar[FileNames | None] = _Names()

    def channels(self, net: Any) -> int:
        return int(net.config.z_dim)

    def factor(self, net: Any) -> int:
        return int(2 ** len(net.config.temperal_downsample))

    def posterior(self, net: Any, pixels_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        posterior = net.encode(pixels_BCHW[:, :, None]).latent_dist
        return posterior.mean[:, :, 0], posterior.logvar[:, :, 0]

    def images(self, net: Any, z_BCHW: Tensor) -> Tensor:
        pixels: Tensor = net.decode(z_BCHW[:, :, None], return_dict=False)[0][:, :, 0]
        return pixels


class QwenImage21VAE(QwenImageVAE):
    """Qwen-Image-2.1's autoencoder, which has a fourth channel, alpha. Images here are opaque."""

    library = AutoencoderKLQwenImage21
    memory_format = torch.channels_last  # its convolutions are of one frame, with four dims
    names = None  # of its files none has been seen
    original = False

    def posterior(self, net: Any, pixels_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        return super().posterior(net, torch.cat([pixels_BCHW, torch.ones_like(pixels_BCHW[:, :1])], 1))

    def images(self, net: Any, z_BCHW: Tensor) -> Tensor:
        return super().images(net, z_BCHW)[:, :3]
