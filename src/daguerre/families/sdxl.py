"""Stable Diffusion XL: two text encoders side by side, and a UNet that is also told the sizes of its pictures.

Podell et al. 2023 (arXiv 2307.01952). The networks are diffusers' and transformers' own, in the folder layout of a
diffusers pipeline. What is trained is as in sd.py; the parts are in models/components.py,
models/text_conditioning.py, models/unet.py and models/vae.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn

from daguerre.models import text_encoder, vae
from daguerre.models import unet as models_unet
from daguerre.models.components import Components
from daguerre.models.export.diffusers import PipelineExporter
from daguerre.models.family import Family
from daguerre.models.settings import BASE, Component, ComponentSpec, UNetSettings
from daguerre.models.text_conditioning import Texts
from daguerre.models.text_encoder import TextReader
from daguerre.settings import ADDRESS, Idle
from daguerre.types import Batch, Cond, Prompt

_SIZES = 6  # original height and width, crop top and left, target height and width
_SIZE_WIDTH = 256


class Settings(UNetSettings):
    """Stable Diffusion XL."""

    family: Literal["sdxl"] = "sdxl"
    """Name of the family."""
    text_encoder_2: Component = BASE
    """The second text encoder, with a projection: its pooled features condition the UNet, too."""
    tokenizer_2: Annotated[str, ADDRESS] = BASE
    """The tokenizer that belongs to it."""
    text_encoder_layer_2: int | None = Field(None, le=-1)
    """Which hidden state of the second text encoder is read. null: the one before the last."""
    text_encoder_final_norm_2: bool | None = None
    """Whether its last norm is applied to that hidden state. null: no."""
    long_prompts_pooled: Literal["first", "last", "weighted"] = "first"
    """Pooled features of a prompt of several windows: of its first, its last, or all, weighted by their tokens."""
    zero_null_text: bool = True
    """The empty caption is zeros instead of what the encoders make of it, as SDXL's base model samples."""

    pipeline_class: ClassVar[str] = "StableDiffusionXLPipeline"
    components: ClassVar[Mapping[str, ComponentSpec]] = {
        **UNetSettings.components,
        "text_encoder_2": ComponentSpec("text_encoder", trainable=True),
        "tokenizer_2": ComponentSpec("tokenizer"),
    }
    idle: ClassVar[tuple[Idle, ...]] = (
        *UNetSettings.idle,
        Idle(("long_prompts_pooled",), lambda own: not own.long_prompts, "no effect without long_prompts=true"),
    )


def load(settings: Settings, seed: int) -> Family:
    """The family of these settings. Raises UserError if something is missing or does not fit together."""
    components = Components(settings, seed)
    autoencoder = vae.load(components)
    first, second = (
        text_encoder.load(components, f"text_encoder{mark}", f"tokenizer{mark}", layer=-2, final_norm=False)
        for mark in ("", "_2")
    )
    texts = Texts((first, second), settings.long_prompts_pooled, settings.zero_null_text)
    unet = models_unet.load(components, autoencoder, texts, _sized(components, second.encoder.config.projection_dim))
    index = {
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "force_zeros_for_empty_prompt": settings.zero_null_text,
    }
    replaced = {"text_encoder": lambda: _as_read(first)}
    exporter = PipelineExporter(settings.pipeline_class, index, replaced, tuple(_differences(first, second)))
    family = models_unet.family(components, unet, autoencoder, texts, exporter)
    return replace(family, batch_condition=_sizes_of_batch, prompt_condition=_sizes_of_prompts)


def _sizes_of_batch(batch: Batch) -> Cond:
    return {"sizes": torch.from_numpy(batch.sizes.astype(np.float32))}


def _sizes_of_prompts(prompts: Sequence[Prompt], pixel_shape: tuple[int, ...], unguided: bool) -> Cond:
    """The images are said to be whole ones: of the size that is generated, and not cropped."""
    _, height, width = pixel_shape
    return {"sizes": torch.tensor([[height, width, 0, 0, height, width]] * len(prompts), dtype=torch.float32)}


def _as_read(first: TextReader) -> nn.Module:
    """The first text encoder without the layers that are not read: the pipeline reads the layer before the last."""
    if first.layer < -2 and not first.final_norm:
        return text_encoder.cut_to(first, first.layers + first.layer + 2)
    return first.encoder


def _differences(first: TextReader, second: TextReader) -> list[str]:
    """Notices where StableDiffusionXLPipeline reads captions otherwise."""
    found = []
    if first.long:
        found.append("StableDiffusionXLPipeline cuts prompts to one window; this run reads them whole")
    if first.layer == -1 or first.final_norm or (second.layer, second.final_norm) != (-2, False):
        found.append("StableDiffusionXLPipeline reads both text encoders before the last layer, this run does not")
    return found


def _sized(components: Components, pooled_width: int) -> dict[str, Any]:
    """What this family decides of its UNet: pooled text and six sizes, each in sines and cosines."""
    given = components.settings.places["unet"]
    numbers = given if isinstance(given, dict) else components.config("unet")
    width = numbers.get("addition_time_embed_dim") or _SIZE_WIDTH
    return {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": width,
        "projection_class_embeddings_input_dim": pooled_width + _SIZES * width,
    }
