"""Qwen-Image-Edit, of 2509 and 2511: Qwen-Image's transformer with reference images, which its text encoder sees.

Qwen 2025 (arXiv 2508.02324, https://huggingface.co/Qwen/Qwen-Image-Edit-2511). Tokens of reference images follow those
of the image that is made; in 2511 they are modulated as at time 0.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field

from daguerre.models import trained_net
from daguerre.models.components import ComponentLoader, check_fits
from daguerre.models.export.diffusers import TRUE_CFG, PipelineExporter
from daguerre.models.family import Family
from daguerre.models.parts import vae
from daguerre.models.parts.qwen.transformer import (
    NAMES,
    PATCH,
    TRANSFORMER,
    NormKept,
    TwoStreams,
    denoise,
    edits,
    unread,
)
from daguerre.models.parts.settings import TransformerSettings
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text.pictures import VISION, PicturedText
from daguerre.models.reading import Reading
from daguerre.models.schedulers.flow_matching import FlowMatching
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.models.settings import BASE, Component, ComponentSpec, ReferenceSettings
from daguerre.samplers.guidance import Guidance
from daguerre.types import REFERENCES, References

_SYSTEM = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n"
)
_READS = Reading(
    kinds=("language_model",), template=f"{_SYSTEM}<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n",
    dropped=64, padding="longest", masked=True, text_mask=True,
)  # fmt: skip
"""QwenImageEditPlusPipeline leaves out the system's turn, and the beginning of the user's."""
_RULE = References(most=len(REFERENCES), least=1, step_px=32, enlarges=True, stretches=True, sizing=-1)
"""Every picture is resized to about 1024 x 1024 px in all, small ones too."""


class Settings(TransformerSettings, ReferenceSettings):
    """Qwen-Image-Edit-2509 or 2511."""

    family: Literal["qwen_image_edit"] = "qwen_image_edit"
    """Name of the family."""
    text_encoder: Component = BASE
    """The language model, which sees the reference images: Qwen2.5-VL."""
    max_sequence_length: int = Field(1024, ge=1, le=4096)
    """Tokens that are read of a caption with the end of its template, without those of reference images; longer ones
    are cut."""
    references: int = Field(1, ge=1, le=len(REFERENCES))
    """Most reference images of a sample in training. Each sample has one at least; the authors' models were trained
    with one to three."""

    pipeline_class: ClassVar[str] = "QwenImageEditPlusPipeline"
    schedulers: ClassVar[Schedulers] = FlowMatching(token_px=16)
    guidance: ClassVar[Guidance] = NormKept()
    reference_rule: ClassVar[References] = replace(_RULE, seen=replace(_RULE, max_px=384 * 384))
    usual: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "data": {"resolution": 1024},
        "sampling": {"guidance_scale": 4.0, "num_inference_steps": 40},
    }
    components: ClassVar[Mapping[str, ComponentSpec]] = {
        **TransformerSettings.components,
        "tokenizer": ComponentSpec("tokenizer", folder="processor"),
    }


def load(settings: Settings, seed: int) -> Family:
    """The family of these settings. Raises UserError if something is missing or does not fit together."""
    components = ComponentLoader(settings, seed)
    autoencoder = vae.load(components, "AutoencoderKLQwenImage", PATCH)
    reading = replace(_READS, max_tokens=settings.max_sequence_length)
    encoder = text_encoder.load(components, "text_encoder", "tokenizer", reading)
    text_encoder.check_kind(encoder, "qwen2_5_vl", "Qwen2.5-VL 7B")
    texts = PicturedText((encoder,), null=" ", written=f"Picture {{}}: {VISION}")
    decided = {"in_channels": PATCH**2 * autoencoder.channels, "out_channels": autoencoder.channels}
    decided |= {"joint_attention_dim": texts.width}
    transformer = components.network("transformer", TwoStreams, decided, NAMES)
    check_fits("transformer", transformer, decided)
    processor = {"processor": ["transformers", "Qwen2VLProcessor"]}
    words = {"tokenizer": ["transformers", encoder.tokenizer_class]}
    exporter = PipelineExporter(settings, processor | words, {}, copies={"tokenizer": "processor"}, **TRUE_CFG)
    return trained_net.family(
        components,
        partial(denoise, transformer),
        {"transformer": transformer, "vae": autoencoder.net},
        {"transformer": replace(TRANSFORMER, unread=unread(transformer), architecture=edits)},
        autoencoder,
        texts,
        exporter,
    )
