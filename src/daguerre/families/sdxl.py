"""Stable Diffusion XL: two text encoders side by side, and a UNet that is also told the sizes of its pictures.

Podell et al. 2023 (arXiv 2307.01952). The networks are diffusers' and transformers' own, in the folder layout of a
diffusers pipeline. What is trained is as in sd.py; the parts are in components.py, texts.py, unets.py and vae.py.

Shape letters: B samples, C channels, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from daguerre.families import pipeline, remarks, text_encoder, unets, vae
from daguerre.families.components import Components
from daguerre.families.family import TextToImage
from daguerre.families.settings import BASE, Component, PretrainedSettings
from daguerre.families.texts import Texts
from daguerre.families.unets import UNet
from daguerre.families.vae import VAE
from daguerre.objectives.objective import Objective
from daguerre.samplers.settings import SamplingSettings
from daguerre.settings import ADDRESS, Idle
from daguerre.types import Batch, Cond

_SIZES = 6  # original height and width, crop top and left, target height and width
_SIZE_WIDTH = 256


class Settings(PretrainedSettings):
    """Stable Diffusion XL."""

    family: Literal["sdxl"] = "sdxl"
    """Name of the family."""
    text_encoder_2: Component = BASE
    """The second text encoder, with a projection: its pooled features condition the UNet, too."""
    tokenizer_2: Annotated[str, ADDRESS] = BASE
    """The tokenizer that belongs to it."""
    train_text_encoder_2: bool = False
    """Train the second text encoder, too."""
    text_encoder_layer_2: int | None = Field(None, le=-1)
    """Which hidden state of the second text encoder is read. null: the one before the last."""
    text_encoder_final_norm_2: bool | None = None
    """Whether its last norm is applied to that hidden state. null: no."""
    long_prompts_pooled: Literal["first", "last", "weighted"] = "first"
    """Pooled features of a prompt of several windows: of its first, its last, or all, weighted by their tokens."""
    zero_null_text: bool = True
    """The empty caption is zeros instead of what the encoders make of it, as SDXL's base model samples."""

    trainable: ClassVar[tuple[str, ...]] = (*PretrainedSettings.trainable, "train_text_encoder_2")
    components: ClassVar[tuple[str, ...]] = (*PretrainedSettings.components, "text_encoder_2")
    tokenizers: ClassVar[tuple[str, ...]] = (*PretrainedSettings.tokenizers, "tokenizer_2")
    idle: ClassVar[tuple[Idle, ...]] = (
        *PretrainedSettings.idle,
        Idle(("long_prompts_pooled",), lambda own: not own.long_prompts, "no effect without long_prompts=true"),
    )


@dataclass(frozen=True, eq=False)
class StableDiffusionXL(TextToImage):
    """The networks of one SDXL pipeline."""

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
        encoders = {reader.name: reader.encoder for reader in self.texts.readers}
        return {"unet": self.unet, "vae": self.vae.net, **encoders}

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.vae.latent_shape(pixel_shape)

    def draws(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        return self.vae.draws(seed, keys, pixel_shape)

    @torch.no_grad()
    def encode(self, batch: Batch) -> tuple[Tensor, Cond]:
        with torch.autocast(batch.pixels_BCHW.device.type, enabled=False):
            sizes = torch.from_numpy(batch.sizes.astype(np.float32)).to(batch.pixels_BCHW.device)
            return self.vae.encode(batch.pixels_BCHW, batch.draws), {**self.texts.read(batch.texts), "sizes": sizes}

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[str], pixel_shape: tuple[int, ...]) -> Cond:
        """The pictures are told to be whole ones: of the size that is drawn, and not cropped."""
        _, height, width = pixel_shape
        sizes = torch.tensor([[height, width, 0, 0, height, width]] * len(prompts), dtype=torch.float32)
        with torch.autocast(self.unet.device.type, enabled=False):
            return {**self.texts.features(self.texts.tokens(prompts)), "sizes": sizes.to(self.unet.device)}

    @torch.no_grad()
    def decode(self, x0_BCHW: Tensor) -> np.ndarray:
        with torch.autocast(x0_BCHW.device.type, enabled=False):
            return self.vae.decode(x0_BCHW)

    def export(self, folder: Path, objective: Objective, sampling: SamplingSettings) -> list[str]:
        """A folder that stock `StableDiffusionXLPipeline.from_pretrained` opens offline, tokenizers included."""
        more = {
            "feature_extractor": [None, None],
            "image_encoder": [None, None],
            "force_zeros_for_empty_prompt": self.texts.zero_null,
        }
        networks: dict[str, Any] = self.parts()
        reader = self.texts.readers[0]
        if reader.layer < -2 and not reader.final_norm:  # the pipeline reads the layer before the last
            networks["text_encoder"] = text_encoder.cut_to(reader, reader.layers + reader.layer + 2)
        return pipeline.export(
            folder,
            "StableDiffusionXLPipeline",
            networks,
            self.files(),
            more,
            objective,
            sampling,
            self._notices(),
        )

    def remarks(self, objective: Objective) -> list[str]:
        return remarks.remarks(self.components, objective)

    def files(self) -> dict[str, bytes]:
        return self.texts.files()

    def cut(self, texts: Sequence[str]) -> dict[int, str]:
        return self.texts.cut(texts)

    def _notices(self) -> list[str]:
        """Where StableDiffusionXLPipeline reads captions otherwise."""
        first, second = self.texts.readers
        said = []
        if self.texts.readers[0].long:
            said.append("StableDiffusionXLPipeline cuts prompts to one window; this run reads them whole")
        if first.layer == -1 or first.final_norm or (second.layer, second.final_norm) != (-2, False):
            said.append("StableDiffusionXLPipeline reads both text encoders before the last layer, this run does not")
        return said


def load(settings: Settings, seed: int) -> StableDiffusionXL:
    """The family of these settings; UserError says what is missing or does not fit together."""
    components = Components(settings, seed)
    autoencoder = vae.load(components)
    readers = tuple(
        text_encoder.load(components, f"text_encoder{mark}", f"tokenizer{mark}", layer=-2, final_norm=False)
        for mark in ("", "_2")
    )
    texts = Texts(readers, settings.long_prompts_pooled, settings.zero_null_text)
    unet = unets.load(components, autoencoder, texts, _sized(components, readers[1].encoder.config.projection_dim))
    return StableDiffusionXL(UNet(unet, texts, settings.train_unet), unet, autoencoder, texts, components)


def _sized(components: Components, pooled_width: int) -> dict[str, Any]:
    """What this family decides of its UNet: pooled text and six sizes, each in sines and cosines."""
    numbers = components.settings.unet if isinstance(components.settings.unet, dict) else components.config("unet")
    width = numbers.get("addition_time_embed_dim") or _SIZE_WIDTH
    return {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": width,
        "projection_class_embeddings_input_dim": pooled_width + _SIZES * width,
    }
