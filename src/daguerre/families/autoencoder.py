"""A KL autoencoder in training: pictures to latents and back, for the latent families of this folder to use frozen.

The network is diffusers' AutoencoderKL. Its loss is objectives/autoencoder.py, a frozen one in use is vae.py.
Shape letters: B samples, C channels, H and W height and width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from daguerre import keys as keyed
from daguerre.checkpoint.export import replaced
from daguerre.errors import UserError
from daguerre.families import pretrained
from daguerre.families.family import Family
from daguerre.families.settings import FamilySettings
from daguerre.objectives.objective import Objective
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Batch, Cond

_SPREAD_MOMENTUM = 0.01  # of one batch in the running mean square of latents


class Settings(FamilySettings):
    """An autoencoder to be trained from random weights."""

    family: Literal["autoencoder"] = "autoencoder"
    """Name of the family."""
    vae: dict[str, Any]
    """Numbers of an AutoencoderKL, whose weights are drawn from the run's seed; what is not given takes diffusers'
    defaults. Its scaling_factor is measured in training."""
    export_half: bool = False
    """Export float16 weights: half the size."""


class Autoencoder(nn.Module):
    """AutoencoderKL as a net: the clean sample is the picture itself."""

    mean_square: Tensor

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae
        self.register_buffer("mean_square", torch.ones(()))

    def forward(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> tuple[Tensor, Tensor]:
        """The picture again [B, 3, H, W], by way of a drawn latent, and the latent's mean KL [B] in nats an element.

        `cond["posterior"]` [B, C, h, w] is the noise of that draw; `c_noise_B` has no meaning here.
        """
        posterior = self.vae.encode(x_BCHW, return_dict=False)[0]
        if self.training:
            with torch.no_grad():
                self.mean_square.lerp_(posterior.mean.square().mean(), _SPREAD_MOMENTUM)
        z_BCHW = posterior.mean + posterior.std * cond["posterior"]
        # KL(N(m, v) || N(0, 1)) = (m^2 + v - 1 - ln v)/2, Kingma and Welling 2014 (arXiv 1312.6114), appendix B
        kl_BCHW = 0.5 * (posterior.mean.square() + posterior.var - 1.0 - posterior.logvar)
        return self.vae.decode(z_BCHW, return_dict=False)[0], kl_BCHW.flatten(1).mean(1)


@dataclass(frozen=True, eq=False)
class AutoencoderFamily(Family):
    """The one network of this family, which is trained."""

    net: Autoencoder
    export_half: bool

    def to(self, device: torch.device | str) -> Self:
        self.net.to(device)
        return self

    def parts(self) -> dict[str, nn.Module]:
        return {"vae": self.net.vae}

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        self._posterior_shape(pixel_shape)
        return pixel_shape

    def draws(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        noise = keyed.batch_normals(seed, "vae", keys, self._posterior_shape(pixel_shape))
        return {"posterior": torch.from_numpy(noise)}

    @torch.no_grad()
    def encode(self, batch: Batch) -> tuple[Tensor, Cond]:
        x_BCHW = batch.pixels_BCHW.to(torch.float32, memory_format=torch.channels_last) / 127.5 - 1
        return x_BCHW, {"posterior": batch.draws["posterior"]}

    def export(self, folder: Path, objective: Objective, sampling: SamplingSettings) -> list[str]:
        """`vae/` as stock diffusers reads it, with the scaling factor that gives latents unit variance."""
        vae = copy.deepcopy(self.net.vae)
        vae.register_to_config(scaling_factor=round(float(self.net.mean_square) ** -0.5, 4))
        if self.export_half:
            vae.half()
        with replaced(folder) as fresh:
            vae.save_pretrained(fresh / "vae", safe_serialization=True)
        return []

    def remarks(self, objective: Objective) -> list[str]:
        return []

    def files(self) -> dict[str, bytes]:
        return {}

    def cut(self, texts: Sequence[str]) -> dict[int, str]:
        return {}

    def _posterior_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        config = self.net.vae.config
        factor = 2 ** (len(config.block_out_channels) - 1)
        _, height, width = pixel_shape
        if height % factor or width % factor:
            raise UserError(
                f"pictures of {height}x{width} px do not fit this autoencoder, which divides sides by {factor}; "
                f"set data.resolution to a multiple of {factor}"
            )
        return (config.latent_channels, height // factor, width // factor)


def load(settings: Settings, seed: int) -> AutoencoderFamily:
    """An autoencoder of these numbers with weights from `seed`. UserError if diffusers cannot build it."""
    try:
        vae: Any = pretrained.seeded(lambda: AutoencoderKL(**settings.vae), seed)
    except (ValueError, TypeError, IndexError) as error:
        raise UserError(f"model.vae: diffusers cannot build an AutoencoderKL of these numbers: {error}") from error
    return AutoencoderFamily(Autoencoder(vae.to(memory_format=torch.channels_last)), settings.export_half)
