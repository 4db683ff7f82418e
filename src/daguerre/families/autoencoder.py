"""A KL autoencoder in training: pictures to latents and back, for the latent families of this folder to use frozen.

The network is diffusers' AutoencoderKL. Its loss is objectives/autoencoder.py, a frozen one in use is models/vae.py.
Shape letters: B samples, C channels, H and W height and width.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from daguerre import keys as keyed
from daguerre.checkpoint.export import replaced
from daguerre.errors import UserError
from daguerre.models.family import Family
from daguerre.models.pixel_codec import PixelCodec
from daguerre.models.settings import ComponentSpec, FamilySettings
from daguerre.models.weights import load as weights_load
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

    components: ClassVar[Mapping[str, ComponentSpec]] = {"vae": ComponentSpec("autoencoder")}


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


@dataclass(frozen=True)
class Images(PixelCodec):
    """Images of sizes that the autoencoder can divide, and the noise of a draw from their posterior."""

    latent_channels: int
    factor: int
    """By how much each side is divided."""

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the image itself. UserError if its sides do not divide."""
        _, height, width = pixel_shape
        if height % self.factor or width % self.factor:
            raise UserError(
                f"pictures of {height}x{width} px do not fit this autoencoder, which divides sides by {self.factor}; "
                f"set data.resolution to a multiple of {self.factor}"
            )
        return pixel_shape

    def random_inputs(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        """`posterior` [B, C, h, w]."""
        _, height, width = self.latent_shape(pixel_shape)
        shape = (self.latent_channels, height // self.factor, width // self.factor)
        return {"posterior": torch.from_numpy(keyed.batch_normals(seed, "vae", keys, shape))}


def _posterior(batch: Batch) -> Cond:
    return {"posterior": batch.draws["posterior"]}


def _export(
    family: Family, folder: Path, objective: Objective, sampling: SamplingSettings, export_half: bool
) -> list[str]:
    """`vae/` as stock diffusers reads it, with the scaling factor that gives latents unit variance."""
    net: Any = family.net
    vae = copy.deepcopy(net.vae)
    vae.register_to_config(scaling_factor=round(float(net.mean_square) ** -0.5, 4))
    if export_half:
        vae.half()
    with replaced(folder) as fresh:
        vae.save_pretrained(fresh / "vae", safe_serialization=True)
    return []


def load(settings: Settings, seed: int) -> Family:
    """An autoencoder of these numbers with weights from `seed`. UserError if diffusers cannot build it."""
    try:
        vae: Any = weights_load.seeded(lambda: AutoencoderKL(**settings.vae), seed)
    except (ValueError, TypeError, IndexError) as error:
        raise UserError(f"model.vae: diffusers cannot build an AutoencoderKL of these numbers: {error}") from error
    net = Autoencoder(vae.to(memory_format=torch.channels_last))
    images = Images(vae.config.latent_channels, 2 ** (len(vae.config.block_out_channels) - 1))
    exporter = partial(_export, export_half=settings.export_half)
    trained = frozenset(settings.components)
    return Family({"vae": vae}, settings.components, net, images, exporter, batch_condition=_posterior, trained=trained)
