"""diffusers' AutoencoderKLQwenImage and AutoencoderKLQwenImage21: autoencoders of videos, of which an image is one
frame.

Shape letters: B samples, C channels, H and W height and width.
"""

from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLQwenImage21
from torch import Tensor

from daguerre.models.parts.latent_network import LatentNetwork


class QwenImageVAE(LatentNetwork):
    """Qwen-Image's autoencoder. Its config has the statistics of each channel."""

    library: ClassVar[Any] = AutoencoderKLQwenImage
    memory_format = torch.contiguous_format  # convolutions of videos have five dims

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

    def posterior(self, net: Any, pixels_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        return super().posterior(net, torch.cat([pixels_BCHW, torch.ones_like(pixels_BCHW[:, :1])], 1))

    def images(self, net: Any, z_BCHW: Tensor) -> Tensor:
        return super().images(net, z_BCHW)[:, :3]
