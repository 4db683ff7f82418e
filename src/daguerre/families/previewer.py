"""The previewer of Stable Cascade in training: a small decoder of the EfficientNet's latents, which may learn with it.

A previewer alone learns to decode the latents of a frozen EfficientNet. Both together are an autoencoder, in which an
EfficientNet learns from random weights. The loss is objectives/autoencoder.py. Shape letters: B samples, C channels, H
and W height and width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from daguerre import keys as keyed
from daguerre.checkpoint.export import replaced
from daguerre.families.cascade import batch_norms
from daguerre.families.cascade import load as cascade_load
from daguerre.families.cascade.codec import check_sides, compressed, resized
from daguerre.families.cascade.previewer import FACTOR
from daguerre.families.cascade.settings import STABILITY
from daguerre.models import pixel_codec
from daguerre.models.components import ComponentLoader
from daguerre.models.family import Family, Moments
from daguerre.models.network import named
from daguerre.models.settings import Component, ComponentSpec, PretrainedSettings
from daguerre.objectives import autoencoder as reconstruction
from daguerre.objectives.autoencoder import Reconstructed
from daguerre.objectives.objective import Objective
from daguerre.samplers.settings import SamplingSettings
from daguerre.settings import ADDRESS, Unused
from daguerre.types import Batch, Cond, Latents

_PIXELS, _LATENT, _NOISE = "pixels", "latent", "latent_noise"


class Settings(PretrainedSettings):
    """The previewer of Stable Cascade, and the EfficientNet that makes its latents."""

    family: Literal["previewer"] = "previewer"
    """Name of the family."""
    pretrained_model_name_or_path: Annotated[str, ADDRESS] = STABILITY
    """A folder with `previewer` and `effnet`, where these are `base`."""
    previewer: Component = f"{STABILITY}/previewer.safetensors"
    """The previewer: a place, Stability's single file, or numbers for random weights, of which the norms go by each
    batch, which then cannot be cut."""
    effnet: Component = f"{STABILITY}/effnet_encoder.safetensors"
    """The EfficientNet; frozen unless adapter.train has it."""
    latent_noise: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Standard deviation of noise that is added to latents in training: what decodes them then bears errors of Stage C,
    and an EfficientNet that is trained makes latents in which near ones mean nearly the same."""

    pipeline_class: ClassVar[str] = "Previewer"
    files_tell_numbers: ClassVar[bool] = True
    overflows_float16: ClassVar[bool] = True
    components: ClassVar[Mapping[str, ComponentSpec]] = {
        "previewer": ComponentSpec("autoencoder", trainable=True),
        "effnet": ComponentSpec("image_encoder", trainable=True),
    }
    unused_when: ClassVar[tuple[Unused, ...]] = (
        *PretrainedSettings.unused_when,
        Unused(("scheduler",), lambda own: True, "nothing is noised here"),
    )


class Previewing(reconstruction.Autoencoder):
    """Previewer and EfficientNet as a net: the clean sample is the image at the previewer's size."""

    def __init__(self, all_of: Mapping[str, Any], trained: Mapping[str, nn.Module]) -> None:
        """`all_of` are the networks of which those in `trained` are trained."""
        super().__init__()
        for name, network in trained.items():
            self.add_module(name, network)
        self._all = (all_of["effnet"], all_of["previewer"])  # in a tuple: what is frozen is not registered
        self.reads_pixels = "effnet" in trained

    @property
    def last_layer(self) -> Any:
        return self._all[1].blocks[-1].weight

    def forward(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> Reconstructed:
        """The image again [B, 3, h, w], of `latent` [B, C, h / 8, w / 8] or, where the EfficientNet is trained, of
        `pixels` [B, 3, H, W] in [0, 1]. `latent_noise` is added in training."""
        effnet, previewer = self._all
        z_BCHW = compressed(effnet, cond[_PIXELS]) if self.reads_pixels else cond[_LATENT]
        if self.training and _NOISE in cond:
            z_BCHW = z_BCHW + cond[_NOISE]
        return Reconstructed(previewer(z_BCHW) * 2 - 1, {})


@dataclass(frozen=True)
class Images:
    """Images, as the previewer shall make them: smaller than those that are compressed."""

    effnet: Any
    latent_noise: float

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(3, h, w) of the previewer's image. UserError if the sides do not divide."""
        _, height, width = self._latent(pixel_shape)
        return 3, FACTOR * height, FACTOR * width

    def _latent(self, pixel_shape: tuple[int, ...]) -> tuple[int, int, int]:
        stride = int(self.effnet.stride)
        check_sides(pixel_shape, stride, "the EfficientNet")
        return int(self.effnet.config.latent_channels), pixel_shape[1] // stride, pixel_shape[2] // stride

    def random_inputs(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        """`latent_noise` [B, C, H / stride, W / stride], where there is some."""
        if self.latent_noise == 0:
            return {}
        noise = keyed.batch_normals(seed, "latent noise", keys, self._latent(pixel_shape))
        return {_NOISE: self.latent_noise * torch.from_numpy(noise)}

    def encode(self, pixels_BCHW: Tensor) -> Moments:
        """`mean` [B, 3, h, w] in [-1, 1]: the images at the previewer's size."""
        _, height, width = self.latent_shape(tuple(pixels_BCHW.shape[1:]))
        return {"mean": resized(pixels_BCHW.float() / 255, height, width) * 2 - 1}

    def latents(self, moments: Moments, random_inputs: Mapping[str, Tensor]) -> Tensor:
        return moments["mean"]

    def decode(self, latents: Latents) -> Tensor:
        return pixel_codec.levels(latents.x0_BCHW)


@dataclass(frozen=True, eq=False)
class _Reading:
    """Reads the net's inputs from a batch."""

    effnet: Any

    @torch.no_grad()
    def of_batch(self, batch: Batch, moments: Moments) -> Cond:
        """`latent` by the frozen EfficientNet, or `pixels` for one that is trained; the noise of latents."""
        pixels_BCHW = batch.pixels_BCHW.float() / 255
        told = {_NOISE: batch.draws[_NOISE]} if _NOISE in batch.draws else {}
        if any(p.requires_grad for p in self.effnet.parameters()):
            return {_PIXELS: pixels_BCHW, **told}
        with torch.autocast(pixels_BCHW.device.type, enabled=False):
            return {_LATENT: compressed(self.effnet, pixels_BCHW), **told}


def _export(family: Family, folder: Path, objective: Objective, sampling: SamplingSettings) -> list[str]:
    """`previewer/` and `effnet/` with diffusers' configs."""
    with replaced(folder) as fresh:
        for name, network in family.components.items():
            if name in Settings.components:
                network.save_pretrained(fresh / name, safe_serialization=True)  # type: ignore[operator]
    return []


def load(settings: Settings, seed: int) -> Family:
    """The family of these settings, in which the previewer is trained. UserError for networks that cannot be read, or
    do not belong together."""
    components = ComponentLoader(settings, seed)
    networks = {name: cascade_load.network(components, name) for name in settings.components}
    cascade_load.check_previewer(networks)
    for name, network in networks.items():
        if isinstance(getattr(settings, name), str):
            batch_norms.keep(network)
        network.requires_grad_(False)
    whole = Family(
        named(networks, settings.components, {}), Previewing(networks, {}),
        Images(networks["effnet"], settings.latent_noise), _export,
        batch_condition=_Reading(networks["effnet"]).of_batch, pretrained=components.reading,
        make_net=partial(Previewing, networks),
    )  # fmt: skip
    return whole.training(["previewer"])
