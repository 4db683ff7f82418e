"""diffusers' AutoencoderKL (Rombach et al. 2022, arXiv 2112.10752): Stable Diffusion's, FLUX.1's and SD3's.

Shape letters: B samples, C channels, H and W height and width.
"""

import copy
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from daguerre.models.parts.latent_network import LatentNetwork


class KL(LatentNetwork):
    """A KL autoencoder of images."""

    library = AutoencoderKL

    def channels(self, net: Any) -> int:
        return int(net.config.latent_channels)

    def factor(self, net: Any) -> int:
        return 2 ** (len(net.config.block_out_channels) - 1)

    def posterior(self, net: Any, pixels_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        posterior = net.encode(pixels_BCHW).latent_dist
        return posterior.mean, posterior.logvar

    def images(self, net: Any, z_BCHW: Tensor) -> Tensor:
        pixels: Tensor = net.decode(z_BCHW, return_dict=False)[0]
        return pixels


def set_statistics(net: Any, mean_C: Tensor, std_C: Tensor) -> None:
    """Puts statistics into buffers, which move with the network and are not saved with it."""
    net.register_buffer("channel_mean", mean_C.reshape(-1, 1, 1), persistent=False)
    net.register_buffer("channel_std", std_C.reshape(-1, 1, 1), persistent=False)


def scaled(net: Any, statistics: bool = False) -> Any:
    """The network for pipelines that apply the scaling factor alone, or `statistics` as well, but never a shift."""
    applied = net.config.shift_factor is None and (statistics or net.config.latents_mean is None)
    return net if applied else folded(net)


@torch.no_grad()
def folded(net: Any) -> Any:
    """A copy whose latents are centred and scaled by its own weights, for pipelines that apply no statistics.

    Behind the encoder: mean' = (mean - m)/s, logvar' = logvar - 2 ln s. Before the decoder: W (s z + m) + b. The
    network gets 1x1 convolutions there if it has none.
    """
    # A copy: the run goes on with the network as it is.
    made = copy.deepcopy(net)
    m_C, s_C = made.channel_mean.flatten(), made.channel_std.flatten()
    made.quant_conv = made.quant_conv or _identity(2 * len(m_C)).to(m_C.device)
    made.post_quant_conv = made.post_quant_conv or _identity(len(m_C)).to(m_C.device)
    before, after = made.post_quant_conv, made.quant_conv
    # The bias before the weight: it needs the weight as it was.
    before.bias += before.weight[:, :, 0, 0] @ m_C
    before.weight *= s_C.reshape(1, -1, 1, 1)
    mean, logvar = slice(None, len(m_C)), slice(len(m_C), None)
    after.weight[mean] /= s_C.reshape(-1, 1, 1, 1)
    after.bias[mean] = (after.bias[mean] - m_C) / s_C
    after.bias[logvar] -= 2.0 * s_C.log()
    made.register_to_config(
        latents_mean=None, latents_std=None, shift_factor=None, use_quant_conv=True, use_post_quant_conv=True
    )
    return made


def _identity(channels: int) -> nn.Module:
    """A 1x1 convolution that changes nothing."""
    # Without random weights: an export must leave torch's random state as it was.
    conv = nn.utils.skip_init(nn.Conv2d, channels, channels, 1)
    nn.init.dirac_(conv.weight)
    nn.init.zeros_(conv.bias)
    return conv
