"""A KL autoencoder in training, for latent families to use frozen: diffusers' AutoencoderKL.

Its loss is objectives/autoencoder.py, a frozen one in use is models/vae.py. Shape letters: B samples, C channels, H and
W height and width.
"""

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

from daguerre.checkpoint.export import replaced
from daguerre.models.family import Family, Moments
from daguerre.models.pixel_codec import PixelCodec
from daguerre.models.settings import ComponentSpec, FamilySettings
from daguerre.models.vae import latent_shape, posterior_noise
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
    """AutoencoderKL as a net: the clean sample is the image itself."""

    mean_square: Tensor

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae
        self.register_buffer("mean_square", torch.ones(()))

    def forward(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> tuple[Tensor, Tensor]:
        """The image again [B, 3, H, W], by way of a drawn latent, and the latent's mean KL [B] in nats an element.

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

    vae: Any

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the image itself. UserError if its sides do not divide."""
        latent_shape(self.vae, pixel_shape)
        return pixel_shape

    def random_inputs(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        """`posterior` [B, C, h, w]."""
        return posterior_noise(self.vae, seed, keys, pixel_shape)


def _posterior(batch: Batch, moments: Moments) -> Cond:
    return {"posterior": batch.draws["posterior"]}


def _export(
    family: Family, folder: Path, objective: Objective, sampling: SamplingSettings, export_half: bool
) -> list[str]:
    """`vae/` as stock diffusers reads it, with the scaling factor that gives latents unit variance."""
    net: Any = family.net
    exported = copy.deepcopy(net.vae)
    exported.register_to_config(scaling_factor=round(float(net.mean_square) ** -0.5, 4))
    if export_half:
        exported.half()
    with replaced(folder) as fresh:
        exported.save_pretrained(fresh / "vae", safe_serialization=True)
    return []


def load(settings: Settings, seed: int) -> Family:
    """An autoencoder of these numbers with weights from `seed`. UserError if diffusers cannot build it."""
    network: Any = weights_load.seeded(lambda: AutoencoderKL(**settings.vae), seed, "model.vae")
    net = Autoencoder(network.to(memory_format=torch.channels_last))
    exporter = partial(_export, export_half=settings.export_half)
    return Family(
        {"vae": network}, settings.components, net, Images(network), exporter,
        batch_condition=_posterior, trained=frozenset(settings.components),
    )  # fmt: skip
