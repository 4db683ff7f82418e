"""diffusers' AutoencoderKLQwenImage: an autoencoder of videos, of which an image is one frame.

Shape letters: B samples, C channels, H and W height and width.
"""

from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from torch import Tensor

from daguerre.models.parts.latent_network import LatentNetwork


class QwenImageVAE(LatentNetwork):
    """Qwen-Image's autoencoder. Its config has the statistics of each channel."""

    library = AutoencoderKLQwenImage
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
