"""A frozen autoencoder in use: images to latents and back, for every latent family.

Scaling, statistics of channels, posterior and range of pixels are those of diffusers' pipelines, and are in the
network's config, and so in an export. Shape letters: B samples, C channels, H and W height and width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from daguerre import keys as keyed
from daguerre.errors import UserError
from daguerre.models import pixel_codec
from daguerre.models.components import ComponentLoader
from daguerre.models.family import Moments
from daguerre.models.parts.flux2_vae import Flux2VAE
from daguerre.models.parts.kl import KL, set_statistics
from daguerre.models.parts.latent_network import LatentNetwork
from daguerre.models.parts.qwen.vae import QwenImage21VAE, QwenImageVAE
from daguerre.types import REFERENCES, Cond, Latents

_KINDS: Mapping[str, LatentNetwork] = {
    kind.library.__name__: kind for kind in (KL(), Flux2VAE(), QwenImageVAE(), QwenImage21VAE())
}


@dataclass(frozen=True, eq=False)
class VAE:
    """An autoencoder; latents are scaling_factor times what it makes (Rombach et al. 2022, arXiv 2112.10752).

    With statistics, z = (x - latents_mean) scaling_factor / latents_std, channel by channel, as in SDXL's pipeline.
    With a shift_factor, z = (x - shift_factor) scaling_factor, as in those of FLUX and SD3.
    """

    net: Any
    """The network, frozen. Its buffers `channel_mean` and `channel_std` [C, 1, 1], where it has statistics, are not
    saved with it: its config is."""
    sample_posterior: bool
    """Draw each latent from its posterior; else take the posterior's mean."""
    patch: int = 1
    """Side in latent pixels of a token of the denoiser: sides of latents are multiples of it."""
    most_tokens: int | None = None
    """Most tokens to a side for which the denoiser has places; None: any number."""

    @property
    def kind(self) -> LatentNetwork:
        """The kind of the network."""
        return _kind(self.net)

    @property
    def has_statistics(self) -> bool:
        """True if channels are centred and scaled each by itself."""
        return hasattr(self.net, "channel_mean")

    @property
    def channels(self) -> int:
        return self.kind.channels(self.net)

    @property
    def networks(self) -> dict[str, nn.Module]:
        return {"vae": self.net}

    def rules(self) -> dict[str, Any]:
        """{}, as statistics, scaling and the draw come after the moments."""
        return {}

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        shape = latent_shape(self.net, pixel_shape, self.patch)
        if self.most_tokens is not None and max(shape[1:]) > self.most_tokens * self.patch:
            height, width = pixel_shape[1:]
            most_px = self.most_tokens * self.patch * factor(self.net)
            raise UserError(
                f"images of {height}x{width} px do not fit this model, which has places for sides of {most_px} px at "
                "most: make data.resolution smaller (for generating: height and width)",
                setting="data.resolution",
            )
        return shape

    def random_inputs(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        """`posterior` as `posterior_noise` has it; {} where the posterior's mean is taken."""
        return posterior_noise(self.net, seed, keys, pixel_shape) if self.sample_posterior else {}

    def encode(self, pixels_BCHW: Tensor) -> Moments:
        """`mean` and `logvar` [B, C, h, w] of the posterior of uint8 pixels, before statistics and scaling."""
        # Before statistics and scaling: cached rows stay valid where a recipe changes these.
        mean, logvar = self.kind.posterior(self.net, pixel_codec.scaled(pixels_BCHW))
        return {"mean": mean, "logvar": logvar}

    def latents(self, moments: Moments, random_inputs: Mapping[str, Tensor]) -> Tensor:
        """Latents [B, C, h, w] float32: scaling_factor (mean + exp(logvar / 2) noise), after the statistics."""
        z_BCHW = moments["mean"]
        if self.sample_posterior:
            z_BCHW = z_BCHW + torch.exp(0.5 * moments["logvar"]) * random_inputs["posterior"]
        if self.has_statistics:
            z_BCHW = (z_BCHW - self.net.channel_mean) / self.net.channel_std
        # As rows of a cache lie: kernels are chosen by strides, and round differently.
        return (self._scaling * z_BCHW).contiguous()

    def decode(self, latents: Latents) -> Tensor:
        z_BCHW = latents.x0_BCHW.float() / self._scaling
        if self.has_statistics:
            z_BCHW = z_BCHW * self.net.channel_std + self.net.channel_mean
        return pixel_codec.levels(self.kind.images(self.net, z_BCHW.to(memory_format=self.kind.memory_format)))

    @property
    def _scaling(self) -> float:
        return float(self.net.config.get("scaling_factor", 1.0))


def references(autoencoder: VAE, moments: Moments) -> Cond:
    """The latents [B, C, h, w] of reference images, by name: the mean of the posterior, whatever is trained on."""
    mean = replace(autoencoder, sample_posterior=False)
    names = [name for name in REFERENCES if f"{name}.mean" in moments]
    return {name: mean.latents({"mean": moments[f"{name}.mean"]}, {}) for name in names}


def given(cond: Cond, x_BCHW: Tensor) -> list[Tensor]:
    """The latents of reference images that a denoiser is given, in their order and in the type of `x_BCHW`."""
    return [cond[name].to(x_BCHW.dtype) for name in REFERENCES if name in cond]


def kind_of(library: str) -> LatentNetwork:
    """The kind of an autoencoder that a family has loaded, or exported, by its class in diffusers."""
    return _KINDS[library]


def _kind(net: Any) -> LatentNetwork:
    """The kind of a network, by its class or, once FSDP has made a class of its own of that, by the one before."""
    return next(_KINDS[kind.__name__] for kind in type(net).__mro__ if kind.__name__ in _KINDS)


def factor(net: Any) -> int:
    """Number by which an autoencoder divides each side."""
    return _kind(net).factor(net)


def latent_shape(net: Any, pixel_shape: tuple[int, ...], patch: int = 1) -> tuple[int, int, int]:
    """(C, h, w) of the latent of an image (3, H, W). UserError if the sides do not divide, with `patch` latent pixels
    to a side of the denoiser's tokens."""
    (_, height, width), by = pixel_shape, factor(net)
    if height % (by * patch) or width % (by * patch):
        whose = "autoencoder" if patch == 1 else "model"
        raise UserError(
            f"images of {height}x{width} px do not fit this {whose}, which needs sides that are multiples of "
            f"{by * patch}; set data.resolution to a multiple of {by * patch} (for generating: height and width)",
            setting="data.resolution",
        )
    return _kind(net).channels(net), height // by, width // by


def posterior_noise(net: Any, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
    """`posterior` [B, C, h, w]: the noise of each key's draw from its posterior."""
    # By the sample's key, as all noise: on the device it would depend on the batch and the kind of GPU.
    return {"posterior": torch.from_numpy(keyed.batch_normals(seed, "vae", keys, latent_shape(net, pixel_shape)))}


def load(components: ComponentLoader, library: str = KL.library.__name__, patch: int = 1) -> VAE:
    """The autoencoder of these components, frozen, with the scaling that the settings give in place of its own.
    `library` is the class of diffusers that the family uses, `patch` the side of its denoiser's tokens."""
    settings: Any = components.settings  # LatentSettings, or ScaledSettings
    kind = _KINDS[library]
    if isinstance(settings.vae, str) and (named := components.config("vae").get("_class_name", library)) != library:
        raise UserError(
            f"model.vae is of the class {named}, and this family's latents are made by {library}: give an autoencoder "
            "of that class",
            code="unsupported",
            setting="model.vae",
        )
    net = components.network("vae", kind.library, names=kind.names).eval().requires_grad_(False)
    net = net.to(memory_format=kind.memory_format)
    given = {name: getattr(settings, name, None) for name in ("scaling_factor", "latents_mean", "latents_std")}
    # Into the config: an export then has the scaling with which the denoiser was trained.
    net.register_to_config(**{name: value for name, value in given.items() if value is not None})
    if (statistics := _statistics(net)) is not None:
        set_statistics(net, *statistics)
    return VAE(net, settings.sample_posterior, patch)


def _statistics(net: Any) -> tuple[Tensor, Tensor] | None:
    """Mean and deviation [C] by which the config centres and scales channels. UserError where they do not fit."""
    config, channels = net.config, _kind(net).channels(net)
    numbers = {name: config.get(name) for name in ("latents_mean", "latents_std")}
    shift = config.get("shift_factor")
    if all(value is None for value in numbers.values()):
        # A shift is a mean that all channels have, with a deviation of 1, which divides to the bit.
        return None if shift is None else (torch.full((channels,), shift), torch.ones(channels))
    for name, value in numbers.items():
        if value is None or len(value) != channels:
            raise UserError(
                f"{name} must have one number for each of the {channels} latent channels of the "
                f"autoencoder, got {'none' if value is None else len(value)}: set model.latents_mean and "
                "model.latents_std",
                setting=f"model.{name}",
            )
    if shift is not None:
        raise UserError(
            f"the autoencoder has shift_factor {shift:g} in its config, and latents_mean is given, "
            "which centres its channels, too: remove model.latents_mean and model.latents_std",
            code="conflict",
            setting="model.latents_mean",
        )
    mean, std = (torch.tensor(value) for value in numbers.values())
    return mean, std
