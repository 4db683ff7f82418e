"""Stable Diffusion XL: two text encoders side by side, and a UNet with the sizes of its images as conditioning.

Podell et al. 2023 (arXiv 2307.01952). Else as sd.py.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from daguerre.families.stable_diffusion import facts
from daguerre.families.stable_diffusion import unet as sd_unet
from daguerre.families.stable_diffusion.settings import UNetSettings
from daguerre.models.components import ComponentLoader
from daguerre.models.export.diffusers import PipelineExporter
from daguerre.models.family import Family
from daguerre.models.parts import kl, vae
from daguerre.models.parts.text import clip
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.reading import Reading
from daguerre.models.schedulers.betas import BetaSchedulers
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.models.settings import BASE, Component, ComponentSpec
from daguerre.samplers.guidance import CLASSIFIER_FREE, Guidance
from daguerre.settings import ADDRESS, Unused
from daguerre.types import Batch, Cond, Prompt

_SIZES = 6  # original height and width, crop top and left, target height and width
_SIZE_WIDTH = 256
_READS = Reading(layers=(-2,), final_norm=False)
"""StableDiffusionXLPipeline's reading of both text encoders; the second's pooled features are read, too."""
FACTS = facts.FACTS


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
    guidance: ClassVar[Guidance] = CLASSIFIER_FREE
    schedulers: ClassVar[Schedulers] = BetaSchedulers()
    told_by_index: ClassVar[Mapping[str, str]] = {"force_zeros_for_empty_prompt": "zero_null_text"}
    of_null: ClassVar[Collection[str]] = ("zero_null_text",)
    components: ClassVar[Mapping[str, ComponentSpec]] = {
        **UNetSettings.components,
        "text_encoder_2": ComponentSpec("text_encoder", trainable=True),
        "tokenizer_2": ComponentSpec("tokenizer"),
    }
    unused_when: ClassVar[tuple[Unused, ...]] = (
        *UNetSettings.unused_when,
        Unused(("long_prompts_pooled",), lambda own: not own.long_prompts, "no effect without long_prompts=true"),
    )


def load(settings: Settings, seed: int) -> Family:
    """The family of these settings. Raises UserError if something is missing or does not fit together."""
    components = ComponentLoader(settings, seed)
    autoencoder = vae.load(components)
    first, second = (
        text_encoder.load(components, f"text_encoder{mark}", f"tokenizer{mark}", reading)
        for mark, reading in (("", _READS), ("_2", replace(_READS, pooled="projected")))
    )
    texts = TextConditioning((first, second), settings.long_prompts_pooled, settings.zero_null_text)
    unet = sd_unet.load(components, autoencoder, texts, _sized(components, second.encoder.config.projection_dim))
    notices = []
    if first.reading.long:
        notices.append("StableDiffusionXLPipeline truncates prompts to 77 tokens; this run reads all tokens")
    one, two = first.reading, second.reading
    if one.layers == (-1,) or one.final_norm or (two.layers, two.final_norm) != (_READS.layers, _READS.final_norm):
        notices.append("StableDiffusionXLPipeline reads both text encoders before the last layer, this run does not")
    index = {"force_zeros_for_empty_prompt": settings.zero_null_text}
    replaced = {
        "text_encoder": lambda: clip.as_read(first.encoder, first.reading, _READS),
        "vae": lambda: kl.scaled(autoencoder.net, statistics=True),
    }
    exporter = PipelineExporter(settings, index, replaced, tuple(notices))
    family = sd_unet.family(components, unet, autoencoder, texts, exporter)
    return replace(family, batch_numbers=_sizes_of_batch, prompt_condition=_sizes_of_prompts)


def _sizes_of_batch(batch: Batch) -> Cond:
    return {"sizes": torch.from_numpy(batch.sizes.astype(np.float32))}


def _sizes_of_prompts(prompts: Sequence[Prompt], pixel_shape: tuple[int, ...], unguided: bool) -> Cond:
    """Sizes of whole images: those that are generated, not cropped."""
    _, height, width = pixel_shape
    return {"sizes": torch.tensor([[height, width, 0, 0, height, width]] * len(prompts), dtype=torch.float32)}


def _sized(components: ComponentLoader, pooled_width: int) -> dict[str, Any]:
    """Numbers of the UNet that the family decides: pooled text and six sizes, each in sines and cosines."""
    given = components.settings.places["unet"]
    numbers = given if isinstance(given, dict) else components.config("unet")
    width = numbers.get("addition_time_embed_dim") or _SIZE_WIDTH
    return {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": width,
        "projection_class_embeddings_input_dim": pooled_width + _SIZES * width,
    }
