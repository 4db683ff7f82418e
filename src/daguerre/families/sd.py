"""Stable Diffusion 1.x and 2.x: a KL autoencoder, a text encoder and a UNet with cross attention.

The networks are diffusers' and transformers' own, in the folder layout of a diffusers pipeline. The UNet is trained,
the text encoder beside it or instead of it if the settings say so; the autoencoder (vae.py) is frozen. Where they come
from is in components.py, how captions are read in texts.py, which scheduler goes into an export in scheduler.py.

Shape letters: B samples, C channels, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from daguerre.families import pipeline, remarks, text_encoder, unets, vae
from daguerre.families.components import Components
from daguerre.families.family import TextToImage
from daguerre.families.settings import PretrainedSettings
from daguerre.families.texts import Texts
from daguerre.families.unets import UNet
from daguerre.families.vae import VAE
from daguerre.objectives.objective import Objective
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Batch, Cond


class Settings(PretrainedSettings):
    """Stable Diffusion 1.x or 2.x."""

    family: Literal["sd"] = "sd"
    """Name of the family."""


@dataclass(frozen=True, eq=False)
class StableDiffusion(TextToImage):
    """The networks of one Stable Diffusion pipeline."""

    net: UNet
    unet: Any
    vae: VAE
    texts: Texts
    components: Components

    def to(self, device: torch.device | str) -> Self:
        for part in self.parts().values():
            part.to(device)
        return self

    def parts(self) -> dict[str, nn.Module]:
        return {"unet": self.unet, "vae": self.vae.net, "text_encoder": self.texts.readers[0].encoder}

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.vae.latent_shape(pixel_shape)

    def draws(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        return self.vae.draws(seed, keys, pixel_shape)

    @torch.no_grad()
    def encode(self, batch: Batch) -> tuple[Tensor, Cond]:
        with torch.autocast(batch.pixels_BCHW.device.type, enabled=False):
            return self.vae.encode(batch.pixels_BCHW, batch.draws), self.texts.read(batch.texts)

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[str], pixel_shape: tuple[int, ...]) -> Cond:
        with torch.autocast(self.unet.device.type, enabled=False):
            return self.texts.features(self.texts.tokens(prompts))

    @torch.no_grad()
    def decode(self, x0_BCHW: Tensor) -> np.ndarray:
        with torch.autocast(x0_BCHW.device.type, enabled=False):
            return self.vae.decode(x0_BCHW)

    def export(self, folder: Path, objective: Objective, sampling: SamplingSettings) -> list[str]:
        """A folder that stock `StableDiffusionPipeline.from_pretrained` opens offline, tokenizer included."""
        networks: dict[str, Any] = self.parts()
        reader = self.texts.readers[0]
        if reader.layer != -1 and reader.final_norm:  # the pipeline reads the last layer
            networks["text_encoder"] = text_encoder.cut_to(reader, reader.layers + reader.layer + 1)
        if self.vae.has_statistics:  # StableDiffusionPipeline applies the scaling factor alone
            networks["vae"] = vae.folded(self.vae.net)
        return pipeline.export(
            folder, "StableDiffusionPipeline", networks, self.files(), _INDEX, objective, sampling, self._notices()
        )

    def remarks(self, objective: Objective) -> list[str]:
        return remarks.remarks(self.components, objective)

    def files(self) -> dict[str, bytes]:
        return self.texts.files()

    def cut(self, texts: Sequence[str]) -> dict[int, str]:
        return self.texts.cut(texts)

    def _notices(self) -> list[str]:
        """Where StableDiffusionPipeline reads captions otherwise."""
        reader = self.texts.readers[0]
        said = []
        if reader.long:
            said.append("StableDiffusionPipeline cuts prompts to one window; this run reads them whole")
        if not reader.final_norm:
            said.append("StableDiffusionPipeline applies the text encoder's last norm, which this run leaves out")
        return said


_INDEX: Mapping[str, Any] = {
    "feature_extractor": [None, None],
    "image_encoder": [None, None],
    "requires_safety_checker": False,
    "safety_checker": [None, None],
}


def load(settings: Settings, seed: int) -> StableDiffusion:
    """The family of these settings; UserError says what is missing or does not fit together."""
    components = Components(settings, seed)
    autoencoder = vae.load(components)
    texts = Texts((text_encoder.load(components, "text_encoder", "tokenizer", layer=-1, final_norm=True),))
    unet = unets.load(components, autoencoder, texts)
    return StableDiffusion(UNet(unet, texts, settings.train_unet), unet, autoencoder, texts, components)
