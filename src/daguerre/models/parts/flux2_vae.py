"""diffusers' AutoencoderKLFlux2: a KL autoencoder whose latents are 2x2 patches behind a batch norm without weights.

Shape letters: B samples, C channels of the network, H and W height and width.
"""

from typing import Any

import torch
from diffusers import AutoencoderKLFlux2
from torch import Tensor

from daguerre.models.parts.latent_network import LatentNetwork

_PATCH = 2


class Flux2VAE(LatentNetwork):
    """FLUX.2's autoencoder. Its posterior is that of the patches behind the norm: so latents of a cache need no
    network, as the norm's statistics are weights of it."""

    library = AutoencoderKLFlux2

    def channels(self, net: Any) -> int:
        return int(net.config.latent_channels) * _PATCH**2

    def factor(self, net: Any) -> int:
        return int(2 ** (len(net.config.block_out_channels) - 1)) * _PATCH

    def posterior(self, net: Any, pixels_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        # The norm's running statistics, not those of the batch: the network is frozen, and in evaluation mode.
        posterior, (mean, std) = net.encode(pixels_BCHW).latent_dist, _norm(net)
        # An affine map of a Gaussian: its variance is divided by the square of the deviation.
        return (patched(posterior.mean) - mean) / std, patched(posterior.logvar) - 2 * std.log()

    def images(self, net: Any, z_BCHW: Tensor) -> Tensor:
        mean, std = _norm(net)
        pixels: Tensor = net.decode(unpatched(z_BCHW * std + mean), return_dict=False)[0]
        return pixels


def _norm(net: Any) -> tuple[Tensor, Tensor]:
    """Mean and deviation [4 C, 1, 1] of the batch norm."""
    mean, variance = net.bn.running_mean, net.bn.running_var
    return mean[:, None, None], torch.sqrt(variance + net.config.batch_norm_eps)[:, None, None]


def patched(z_BCHW: Tensor, patch: int = _PATCH) -> Tensor:
    """Latents [B, patch^2 C, H/patch, W/patch] of square patches: the numbers of a channel are neighbours, row by
    row."""
    b, c, h, w = z_BCHW.shape
    z = z_BCHW.reshape(b, c, h // patch, patch, w // patch, patch).permute(0, 1, 3, 5, 2, 4)
    return z.reshape(b, c * patch**2, h // patch, w // patch)


def unpatched(z_BCHW: Tensor, patch: int = _PATCH) -> Tensor:
    """The inverse of `patched`."""
    b, c, h, w = z_BCHW.shape
    z = z_BCHW.reshape(b, c // patch**2, patch, patch, h, w).permute(0, 1, 4, 2, 5, 3)
    return z.reshape(b, c // patch**2, h * patch, w * patch)
