"""Qwen-Image: a transformer with a stream of text and one of image tokens, and attention over both.

Qwen 2025 (arXiv 2508.02324, https://huggingface.co/Qwen/Qwen-Image, and -2512). Trained by flow matching on the hidden
states of Qwen2.5-VL. Shape letters: B samples, C channels, H and W height and width of latents, T tokens, D features.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from diffusers import QwenImageTransformer2DModel
from pydantic import Field

from daguerre.errors import UserError
from daguerre.models import trained_net
from daguerre.models.components import ComponentLoader, check_fits
from daguerre.models.export.diffusers import TRUE_CFG, PipelineExporter
from daguerre.models.family import Family
from daguerre.models.network import Facts
from daguerre.models.parts import vae
from daguerre.models.parts.qwen.transformer import NAMES, PATCH, TRANSFORMER, NormKept, TwoStreams, denoise, unread
from daguerre.models.parts.settings import TransformerSettings
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.reading import Reading
from daguerre.models.schedulers.flow_matching import FlowMatching
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.models.settings import BASE, Component
from daguerre.samplers.guidance import Guidance

_SYSTEM = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n"
)
_READS = Reading(
    kinds=("language_model",), template=f"{_SYSTEM}<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n",
    dropped=34, padding="longest", masked=True, text_mask=True,
)  # fmt: skip
"""QwenImagePipeline leaves out the system's turn, and the beginning of the user's."""

FACTS: dict[type, Facts] = dict.fromkeys((TwoStreams, QwenImageTransformer2DModel), TRANSFORMER)


class Settings(TransformerSettings):
    """Qwen-Image."""

    family: Literal["qwen_image"] = "qwen_image"
    """Name of the family."""
    text_encoder: Component = BASE
    """The language model: Qwen2.5-VL."""
    max_sequence_length: int = Field(1024, ge=1, le=1024)
    """Tokens that are read of a caption with the end of its template; longer ones are cut."""

    pipeline_class: ClassVar[str] = "QwenImagePipeline"
    schedulers: ClassVar[Schedulers] = FlowMatching(token_px=16)
    guidance: ClassVar[Guidance] = NormKept()
    usual: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "data": {"resolution": 1328},
        "sampling": {"guidance_scale": 4.0, "num_inference_steps": 50},
    }


def load(settings: Settings, seed: int) -> Family:
    """The family of these settings. Raises UserError if something is missing or does not fit together."""
    components = ComponentLoader(settings, seed)
    autoencoder = vae.load(components, "AutoencoderKLQwenImage", PATCH)
    reading = replace(_READS, max_tokens=settings.max_sequence_length)
    encoder = text_encoder.load(components, "text_encoder", "tokenizer", reading)
    text_encoder.check_kind(encoder, "qwen2_5_vl", "Qwen2.5-VL 7B")
    texts = TextConditioning((encoder,), null=" ")
    decided = {"in_channels": PATCH**2 * autoencoder.channels, "out_channels": autoencoder.channels}
    decided |= {"joint_attention_dim": texts.width}
    transformer = components.network("transformer", TwoStreams, decided, NAMES)
    check_fits("transformer", transformer, decided)
    if transformer.config.zero_cond_t:
        raise UserError(
            "model.transformer is one of Qwen-Image-Edit-2511 (zero_cond_t in its config), which was trained with "
            "reference images alone, and this family reads none: set model.family=qwen_image_edit, or take "
            "Qwen/Qwen-Image-2512",
            code="unsupported",
            setting="model.transformer",
        )
    return trained_net.family(
        components,
        partial(denoise, transformer),
        {"transformer": transformer, "vae": autoencoder.net},
        {"transformer": replace(TRANSFORMER, unread=unread(transformer))},
        autoencoder,
        texts,
        PipelineExporter(settings, {}, {}, **TRUE_CFG),
    )
