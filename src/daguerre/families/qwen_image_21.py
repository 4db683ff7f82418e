"""Qwen-Image-2.1: one stream of text and image tokens, on an autoencoder of 16 px with alpha.

Qwen 2026 (https://huggingface.co/Qwen/Qwen-Image-2.1). Trained by flow matching on the hidden states of Qwen3-VL. Shape
letters: B samples, C channels, H and W height and width of latents, T tokens, D features.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from diffusers import QwenImage21Transformer2DModel
from pydantic import Field
from torch import Tensor, nn

from daguerre.models import trained_net
from daguerre.models.components import ComponentLoader, check_fits
from daguerre.models.controlnets.controlled import Residuals
from daguerre.models.export.diffusers import TRUE_CFG, PipelineExporter
from daguerre.models.family import Family
from daguerre.models.network import HEAD, Architecture, Facts, layers
from daguerre.models.parts import vae
from daguerre.models.parts.qwen.transformer_21 import Interleaved
from daguerre.models.parts.settings import TransformerSettings
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text.pictures import VISION, PicturedText
from daguerre.models.reading import Reading
from daguerre.models.schedulers.flow_matching import FlowMatching
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.models.settings import BASE, INDEX, Component, ComponentSpec, DistilledSettings, ReferenceSettings
from daguerre.models.weights.original_names import NameTable
from daguerre.samplers.guidance import CLASSIFIER_FREE, Guidance
from daguerre.types import Cond, References

_LEVELS = "sample_sigmas"
"""The noise levels that a pipeline visits, in its index: those of a distilled transformer."""
_PATCH = 2
"""Sides of latents are even: the language model has a place for each 2 x 2 tokens of a reference image."""
_SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
_READS = Reading(
    kinds=("language_model",), template=f"{_SYSTEM}<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n",
    dropped=14, padding="longest", masked=True, text_mask=True, final_norm=False,
)  # fmt: skip
"""QwenImage21Pipeline reads the last hidden state before the norm, of all but the system's turn."""


def _architecture(network: nn.Module, prediction: str) -> Architecture:
    return Architecture("qwen-image-2.1", {"ss_base_model_version": "qwen_image_21"})


_BLOCK = "transformer_blocks.*."
NAMES = NameTable({f"{_BLOCK}img_mlp.gate_up": (f"{_BLOCK}img_mlp.gate_layer", f"{_BLOCK}img_mlp.proj")}, others=True)
"""ComfyUI's names of the transformer, which has one layer of two."""
TRANSFORMER = Facts(
    blocks=("QwenImage21TransformerBlock",),
    axes={
        **layers(("embed", None), "img_in", "txt_in.*_layer"),
        **layers(("time", None), "time_text_embed.timestep_embedder.linear_?"),
        **layers((None, "embed"), "modulation.1", "norm_out.linear", "proj_out"),
        **layers(("heads", "embed"), f"{_BLOCK}attn.to_[qkv]"),
        **layers(("embed", "heads"), f"{_BLOCK}attn.to_out.0"),
        **layers(("mlp", "embed"), f"{_BLOCK}img_mlp.gate_layer", f"{_BLOCK}img_mlp.proj"),
        **layers(("embed", "mlp"), f"{_BLOCK}img_mlp.out"),
        f"{_BLOCK}attn.norm_[qk].weight": (HEAD,),
        "txt_in.text_norm.weight": ("norm",),
    },
    layers={
        "attention": ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        "ff": ("img_mlp.gate_layer", "img_mlp.proj", "img_mlp.out"),
    },
    readers=(("attn", "to_q", "to_k", "to_v"), ("img_mlp", "gate_layer", "proj")),
    names=NAMES,
    architecture=_architecture,
)
FACTS: dict[type, Facts] = dict.fromkeys((Interleaved, QwenImage21Transformer2DModel), TRANSFORMER)


class Settings(TransformerSettings, ReferenceSettings, DistilledSettings):
    """Qwen-Image-2.1."""

    family: Literal["qwen_image_21"] = "qwen_image_21"
    """Name of the family."""
    text_encoder: Component = BASE
    """The language model: Qwen3-VL."""
    max_sequence_length: int = Field(1024, ge=1, le=4096)
    """Tokens that are read of a caption in its template, without those of reference images; longer ones are cut."""
    is_distilled: bool | None = None
    """Whether the transformer was distilled to few steps, as Turbo was: it generates, and is not trained. null: as the
    base's model_index.json says by noise levels of its own (sample_sigmas), which says nothing of a transformer from
    elsewhere."""

    pipeline_class: ClassVar[str] = "QwenImage21Pipeline"
    schedulers: ClassVar[Schedulers] = FlowMatching(token_px=16)
    guidance: ClassVar[Guidance] = CLASSIFIER_FREE
    reference_rule: ClassVar[References] = References(most=10, step_px=32, enlarges=True, stretches=True, sizing=-1)
    usual: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "data": {"resolution": 1024},
        "sampling": {"guidance_scale": 1.0, "num_inference_steps": 40},
    }
    components: ClassVar[Mapping[str, ComponentSpec]] = {
        **TransformerSettings.components,
        "tokenizer": ComponentSpec("tokenizer", folder="processor"),
    }

    @classmethod
    def usual_of(cls, configs: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        """The noise levels that the index of Turbo gives."""
        levels = configs.get(INDEX, {}).get(_LEVELS)
        few = {"guidance_scale": 1.0, "num_inference_steps": len(levels or ()), "timestep_spacing": levels}
        return {**cls.usual, "sampling": few} if levels else cls.usual


def load(settings: Settings, seed: int) -> Family:
    """The family of these settings. Raises UserError if something is missing or does not fit together."""
    components = ComponentLoader(settings, seed)
    autoencoder = vae.load(components, "AutoencoderKLQwenImage21", _PATCH)
    reading = replace(_READS, max_tokens=settings.max_sequence_length)
    encoder = text_encoder.load(components, "text_encoder", "tokenizer", reading)
    text_encoder.check_kind(encoder, "qwen3_vl", "Qwen3-VL 8B")
    texts = PicturedText((encoder,), null=" ", written=f"<image{{}}>{VISION}", between=" ", kept=False, whole=True)
    decided = {"in_channels": autoencoder.channels, "out_channels": autoencoder.channels, "context_in_dim": texts.width}
    transformer = components.network("transformer", Interleaved, decided, NAMES)
    check_fits("transformer", transformer, decided)
    levels = components.index.get(_LEVELS) if settings.transformer == BASE else None
    distilled = bool(levels) if settings.is_distilled is None else settings.is_distilled
    index = {"processor": ["transformers", "Qwen3VLProcessor"]} | ({_LEVELS: levels} if levels else {})
    exporter = PipelineExporter(settings, index, {}, **TRUE_CFG)
    return trained_net.family(
        components,
        partial(denoise, transformer, texts),
        {"transformer": transformer, "vae": autoencoder.net},
        {"transformer": TRANSFORMER},
        autoencoder,
        texts,
        exporter,
        distilled="Qwen/Qwen-Image-2.1" if distilled else "",
    )


def denoise(
    transformer: Any,
    texts: PicturedText,
    x_BCHW: Tensor,
    c_noise_B: Tensor,
    cond: Cond,
    residuals: Residuals = (),
) -> Tensor:
    """The velocity [B, C, H, W] of noisy latents. `cond` has `text` [B, T, D], `text_mask` [B, T] where texts of a
    batch differ in length, and latents [B, C, h, w] of reference images."""
    given = vae.given(cond, x_BCHW)
    before = texts.text_before if given else ()
    y: Tensor = transformer(x_BCHW, c_noise_B, cond["text"], cond.get("text_mask"), given, before)
    return y
