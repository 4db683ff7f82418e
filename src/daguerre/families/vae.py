"""A frozen KL autoencoder in use: pictures to latents and back, for every latent family with diffusers' AutoencoderKL.

Holds the scaling, the posterior and the range of pixels, as diffusers' pipelines have them; nothing is trained here.
Shape letters: B samples, C channels, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from daguerre import keys as keyed
from daguerre.errors import UserError
from daguerre.families import pretrained

FILES = ["config.json", "diffusion_pytorch_model.safetensors"]


@dataclass(frozen=True, eq=False)
class VAE:
    """An AutoencoderKL; latents are scaling_factor times what it makes (Rombach et al. 2022, arXiv 2112.10752)."""

    net: Any
    """AutoencoderKL, frozen, channels last: 1.4 times as fast on a CPU."""
    sample_posterior: bool
    """Draw each latent from its posterior; else take the posterior's mean."""

    @property
    def channels(self) -> int:
        """Channels of a latent."""
        return int(self.net.config.latent_channels)

    @property
    def factor(self) -> int:
        """By how much each side is divided."""
        return 2 ** (len(self.net.config.block_out_channels) - 1)

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(C, h, w) of the latent of a picture (3, H, W). UserError if the sides do not divide."""
        _, height, width = pixel_shape
        if height % self.factor or width % self.factor:
            raise UserError(
                f"pictures of {height}x{width} px do not fit this autoencoder, which divides sides by {self.factor}; "
                f"set data.resolution to a multiple of {self.factor}"
            )
        return (self.channels, height // self.factor, width // self.factor)

    def draws(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        """`posterior` [B, C, h, w]: the noise of each key's draw from its posterior; {} where the mean is taken."""
        if not self.sample_posterior:
            return {}
        noise = keyed.batch_normals(seed, "vae", keys, self.latent_shape(pixel_shape))
        return {"posterior": torch.from_numpy(noise)}

    def encode(self, pixels_BCHW: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """Latents [B, C, h, w] float32 of uint8 pixels: scaling_factor (mean + std noise)."""
        x_BCHW = pixels_BCHW.to(torch.float32, memory_format=torch.channels_last) / 127.5 - 1
        posterior = self.net.encode(x_BCHW).latent_dist
        z_BCHW = posterior.mean
        if self.sample_posterior:
            z_BCHW = z_BCHW + posterior.std * draws["posterior"]
        return (self.net.config.scaling_factor * z_BCHW).contiguous()

    def decode(self, x0_BCHW: Tensor) -> np.ndarray:
        """Pictures [B, H, W, 3] uint8 of latents, rounded as diffusers' VaeImageProcessor does."""
        z_BCHW = (x0_BCHW.float() / self.net.config.scaling_factor).to(memory_format=torch.channels_last)
        pixels_BCHW = self.net.decode(z_BCHW, return_dict=False)[0]
        levels_BCHW = ((pixels_BCHW / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
        return levels_BCHW.permute(0, 2, 3, 1).contiguous().cpu().numpy()


def load(folder: Path, sample_posterior: bool) -> VAE:
    """The autoencoder in `folder`."""
    net = pretrained.load_frozen(AutoencoderKL, folder).to(memory_format=torch.channels_last)
    if net.config.shift_factor is not None:
        raise UserError(
            f"{folder} has a shift_factor, which Stable Diffusion's pipelines do not apply: use another one"
        )
    return VAE(net, sample_posterior)
