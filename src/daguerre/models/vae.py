"""A frozen KL autoencoder in use: images to latents and back, for every latent family with diffusers' AutoencoderKL.

Scaling, statistics of channels, posterior and range of pixels are those of diffusers' pipelines, and are in the
network's config, and so in an export. Shape letters: B samples, C channels, H and W height and width.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from daguerre import keys as keyed
from daguerre.errors import UserError
from daguerre.models import pixel_codec
from daguerre.models.components import ComponentLoader
from daguerre.models.family import Moments
from daguerre.types import Latents


@dataclass(frozen=True, eq=False)
class VAE:
    """An AutoencoderKL; latents are scaling_factor times what it makes (Rombach et al. 2022, arXiv 2112.10752).

    With statistics, z = (x - latents_mean) scaling_factor / latents_std, channel by channel, as in SDXL's pipeline.
    With a shift_factor, z = (x - shift_factor) scaling_factor, as in those of FLUX and SD3.
    """

    net: Any
    """AutoencoderKL, frozen, channels last: 1.4 times as fast on a CPU. Its buffers `channel_mean` and `channel_std`
    [C, 1, 1], where it has statistics, are not saved with it: its config is."""
    sample_posterior: bool
    """Draw each latent from its posterior; else take the posterior's mean."""

    @property
    def has_statistics(self) -> bool:
        """True if channels are centred and scaled each by itself."""
        return hasattr(self.net, "channel_mean")

    @property
    def channels(self) -> int:
        return int(self.net.config.latent_channels)

    @property
    def networks(self) -> dict[str, nn.Module]:
        return {"vae": self.net}

    def rules(self) -> dict[str, Any]:
        """Nothing: statistics, scaling and the draw come after the moments."""
        return {}

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        return latent_shape(self.net, pixel_shape)

    def random_inputs(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        """`posterior` as `posterior_noise` has it; {} where the posterior's mean is taken."""
        return posterior_noise(self.net, seed, keys, pixel_shape) if self.sample_posterior else {}

    def encode(self, pixels_BCHW: Tensor) -> Moments:
        """`mean` and `logvar` [B, C, h, w] of the posterior of uint8 pixels, before statistics and scaling."""
        posterior = self.net.encode(pixel_codec.scaled(pixels_BCHW)).latent_dist
        return {"mean": posterior.mean, "logvar": posterior.logvar}

    def latents(self, moments: Moments, random_inputs: Mapping[str, Tensor]) -> Tensor:
        """Latents [B, C, h, w] float32: scaling_factor (mean + exp(logvar / 2) noise), after the statistics."""
        z_BCHW = moments["mean"]
        if self.sample_posterior:
            z_BCHW = z_BCHW + torch.exp(0.5 * moments["logvar"]) * random_inputs["posterior"]
        if self.has_statistics:
            z_BCHW = (z_BCHW - self.net.channel_mean) / self.net.channel_std
        return (self.net.config.scaling_factor * z_BCHW).contiguous()

    def decode(self, latents: Latents) -> np.ndarray:
        z_BCHW = latents.x0_BCHW.float() / self.net.config.scaling_factor
        if self.has_statistics:
            z_BCHW = z_BCHW * self.net.channel_std + self.net.channel_mean
        return pixel_codec.levels(self.net.decode(z_BCHW.to(memory_format=torch.channels_last), return_dict=False)[0])


def factor(net: Any) -> int:
    """By how much an AutoencoderKL divides each side."""
    return 2 ** (len(net.config.block_out_channels) - 1)


def latent_shape(net: Any, pixel_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(C, h, w) of the latent of an image (3, H, W). UserError if the sides do not divide."""
    (_, height, width), by = pixel_shape, factor(net)
    if height % by or width % by:
        raise UserError(
            f"images of {height}x{width} px do not fit this autoencoder, which needs sides that are multiples of "
            f"{by}; set data.resolution to a multiple of {by} (for generating: height and width)",
            setting="data.resolution",
        )
    return int(net.config.latent_channels), height // by, width // by


def posterior_noise(net: Any, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
    """`posterior` [B, C, h, w]: the noise of each key's draw from its posterior."""
    return {"posterior": torch.from_numpy(keyed.batch_normals(seed, "vae", keys, latent_shape(net, pixel_shape)))}


def load(components: ComponentLoader) -> VAE:
    """The autoencoder of these components, frozen, with the scaling that the settings give in place of its own."""
    settings: Any = components.settings  # LatentSettings
    net = components.network("vae", AutoencoderKL).eval().requires_grad_(False)
    net = net.to(memory_format=torch.channels_last)
    given = {name: getattr(settings, name) for name in ("scaling_factor", "latents_mean", "latents_std")}
    net.register_to_config(**{name: value for name, value in given.items() if value is not None})
    if (statistics := _statistics(net)) is not None:
        set_statistics(net, *statistics)
    return VAE(net, settings.sample_posterior)


def _statistics(net: Any) -> tuple[Tensor, Tensor] | None:
    """Mean and deviation [C] by which the config centres and scales channels. UserError where they do not fit."""
    config = net.config
    numbers = {name: config[name] for name in ("latents_mean", "latents_std")}
    if all(value is None for value in numbers.values()):
        if config.shift_factor is None:
            return None
        # A shift is a mean that all channels have, with a deviation of 1, which divides to the bit.
        return torch.full((config.latent_channels,), config.shift_factor), torch.ones(config.latent_channels)
    for name, value in numbers.items():
        if value is None or len(value) != config.latent_channels:
            raise UserError(
                f"{name} must have one number for each of the {config.latent_channels} latent channels of the "
                f"autoencoder, got {'none' if value is None else len(value)}: set model.latents_mean and "
                "model.latents_std",
                setting=f"model.{name}",
            )
    if config.shift_factor is not None:
        raise UserError(
            f"the autoencoder has shift_factor {config.shift_factor:g} in its config, and latents_mean is given, "
            "which centres its channels, too: remove model.latents_mean and model.latents_std",
            code="conflict",
            setting="model.latents_mean",
        )
    mean, std = (torch.tensor(value) for value in numbers.values())
    return mean, std


def set_statistics(net: Any, mean_C: Tensor, std_C: Tensor) -> None:
    """Puts statistics into buffers, which move with the network and are not saved with it."""
    net.register_buffer("channel_mean", mean_C.reshape(-1, 1, 1), persistent=False)
    net.register_buffer("channel_std", std_C.reshape(-1, 1, 1), persistent=False)


def scaled(autoencoder: VAE, statistics: bool = False) -> Any:
    """The network for pipelines that apply the scaling factor alone, or `statistics` as well, but never a shift."""
    config = autoencoder.net.config
    applied = config.shift_factor is None and (statistics or config.latents_mean is None)
    return autoencoder.net if applied else folded(autoencoder.net)


@torch.no_grad()
def folded(net: Any) -> Any:
    """A copy whose latents are centred and scaled by its own weights, for pipelines that apply no statistics.

    Behind the encoder: mean' = (mean - m)/s, logvar' = logvar - 2 ln s. Before the decoder: W (s z + m) + b. The
    network gets 1x1 convolutions there if it has none.
    """
    made = copy.deepcopy(net)
    m_C, s_C = made.channel_mean.flatten(), made.channel_std.flatten()
    made.quant_conv = made.quant_conv or _identity(2 * len(m_C)).to(m_C.device)
    made.post_quant_conv = made.post_quant_conv or _identity(len(m_C)).to(m_C.device)
    before, after = made.post_quant_conv, made.quant_conv
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
    conv = nn.utils.skip_init(nn.Conv2d, channels, channels, 1)
    nn.init.dirac_(conv.weight)
    nn.init.zeros_(conv.bias)
    return conv
