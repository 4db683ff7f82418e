"""A KL autoencoder in training, for latent families to use frozen: diffusers' AutoencoderKL.

From random weights, or from those of a pretrained one, whose decoder may be trained alone. Its loss is
objectives/autoencoder.py, a frozen one in use is models/parts/vae.py. Shape letters: B samples, C channels, H and W
height and width.
"""

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from daguerre.checkpoint.export import replaced
from daguerre.models.components import ComponentLoader
from daguerre.models.family import Family, Moments
from daguerre.models.network import named
from daguerre.models.parts.facts import KL_AUTOENCODER
from daguerre.models.parts.vae import latent_shape, posterior_noise
from daguerre.models.pixel_codec import PixelCodec
from daguerre.models.settings import BASE, Component, ComponentSpec, PretrainedSettings
from daguerre.objectives import autoencoder as reconstruction
from daguerre.objectives.autoencoder import Reconstructed
from daguerre.objectives.objective import Objective
from daguerre.samplers.settings import SamplingSettings
from daguerre.settings import ADDRESS, Unused
from daguerre.types import Batch, Cond

_SPREAD_MOMENTUM = 0.01  # of one batch in the running mean square of latents
_DECODING = ("post_quant_conv", "decoder")


class Settings(PretrainedSettings):
    """A KL autoencoder that is trained."""

    family: Literal["autoencoder"] = "autoencoder"
    """Name of the family."""
    pretrained_model_name_or_path: Annotated[str, ADDRESS] = "quickstart"
    """The pipeline whose autoencoder is trained, where vae is `base`: `quickstart` (shipped), a folder in diffusers'
    layout, a hub id or a single-file checkpoint."""
    vae: Component = BASE
    """The autoencoder. Of given numbers, what is not given takes diffusers' defaults; its scaling_factor is then
    measured in training, and else it stays as it is."""
    train: Literal["all", "decoder"] = "all"
    """decoder: latents stay as they are, for denoisers that were trained on them."""
    export_half: bool = False
    """Export float16 weights: half the size."""

    pipeline_class: ClassVar[str] = "AutoencoderKL"
    components: ClassVar[Mapping[str, ComponentSpec]] = {"vae": ComponentSpec("autoencoder")}
    unused_when: ClassVar[tuple[Unused, ...]] = (
        *PretrainedSettings.unused_when,
        Unused(("scheduler",), lambda own: True, "nothing is noised here"),
        Unused(
            ("pretrained_model_name_or_path", "revision", "variant"),
            lambda own: isinstance(own.vae, dict),
            "vae is given by its numbers",
        ),
    )


class KLAutoencoder(reconstruction.Autoencoder):
    """AutoencoderKL as a net: the clean sample is the image itself."""

    mean_square: Tensor
    """Of the latents' elements, over the micro-batches of rank 0, so an estimate, which `scaling_factor` of the export
    is computed from: on other devices it differs in its third digit, and no weight depends on it."""

    def __init__(self, vae: Any, train: str) -> None:
        super().__init__()
        self.vae = vae
        self.whole = train == "all"
        self.latent_terms = frozenset({"kl"} if self.whole else ())
        self.register_buffer("mean_square", torch.ones(()))

    @property
    def last_layer(self) -> Any:
        return self.vae.decoder.conv_out.weight

    def forward(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> Reconstructed:
        """The image again [B, 3, H, W], by way of a drawn latent, and the latent's mean KL [B] in nats an element.

        `cond["posterior"]` [B, C, h, w] is the noise of that draw; `c_noise_B` has no meaning here.
        """
        with nullcontext() if self.whole else torch.no_grad():
            posterior = self.vae.encode(x_BCHW, return_dict=False)[0]
            z_BCHW = posterior.mean + posterior.std * cond["posterior"]
        terms = {}
        if self.whole:
            # KL(N(m, v) || N(0, 1)) = (m^2 + v - 1 - ln v)/2, Kingma and Welling 2014 (arXiv 1312.6114), appendix B
            kl_BCHW = 0.5 * (posterior.mean.square() + posterior.var - 1.0 - posterior.logvar)
            terms["kl"] = kl_BCHW.flatten(1).mean(1)
        if self.training:
            with torch.no_grad():
                self.mean_square.lerp_(posterior.mean.float().square().mean(), _SPREAD_MOMENTUM)
        return Reconstructed(self.vae.decode(z_BCHW, return_dict=False)[0], terms)


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
    family: Family, folder: Path, objective: Objective, sampling: SamplingSettings, settings: Settings
) -> list[str]:
    """`vae/` as stock diffusers reads it; of one from random weights with the scaling factor that gives latents unit
    variance."""
    net: Any = family.net
    exported = copy.deepcopy(net.vae)
    if isinstance(settings.vae, dict):
        exported.register_to_config(scaling_factor=round(float(net.mean_square) ** -0.5, 4))
    if settings.export_half:
        exported.half()
    with replaced(folder) as fresh:
        exported.save_pretrained(fresh / "vae", safe_serialization=True)
    return []


def load(settings: Settings, seed: int) -> Family:
    """The autoencoder of these settings, all of which is trained, or its decoder. UserError if it cannot be read or
    built."""
    components = ComponentLoader(settings, seed)
    network = components.network("vae", AutoencoderKL).to(memory_format=torch.channels_last)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(settings.train == "all" or name.startswith(_DECODING))
    return Family(
        named({"vae": network}, settings.components, {"vae": KL_AUTOENCODER}),
        KLAutoencoder(network, settings.train), Images(network), partial(_export, settings=settings),
        batch_condition=_posterior, trained=frozenset(settings.components), pretrained=components.reading,
    )  # fmt: skip
