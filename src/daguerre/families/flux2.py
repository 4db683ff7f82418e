"""FLUX.2 klein: a transformer on latents with joint attention to hidden states of Qwen3 and to reference images.

Black Forest Labs 2025 (https://github.com/black-forest-labs/flux2). The base models of 4B and 9B are trained by flow
matching; those without `base` in their name were distilled to few steps. Latents are 2 x 2 patches behind the
autoencoder's norm, one a token.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from pydantic import Field
from torch import nn

from daguerre.errors import UserError
from daguerre.models import trained_net
from daguerre.models.components import ComponentLoader, check_fits
from daguerre.models.export.diffusers import PipelineExporter
from daguerre.models.family import Family
from daguerre.models.network import Architecture, Facts
from daguerre.models.parts import flux2_transformer, vae
from daguerre.models.parts.facts import KL_AUTOENCODER, TEXT_ENCODERS
from daguerre.models.parts.flux_names import FLUX2
from daguerre.models.parts.flux_transformer import flux2_axes
from daguerre.models.parts.settings import TransformerSettings
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.reading import Reading
from daguerre.models.schedulers.flow_matching import FlowMatching
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.models.settings import BASE, INDEX, Component, DistilledSettings, ReferenceSettings
from daguerre.samplers.guidance import CLASSIFIER_FREE, Guidance, Unguided
from daguerre.types import References

_READS = Reading(
    kinds=("language_model",), masked=True, final_norm=False,
    template="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)  # fmt: skip
"""Flux2KleinPipeline reads a user's turn without thinking. The padding is hidden from Qwen3, and not from the
transformer: the window is a part of the model."""
_LAYERS = [9, 18, 27]
"""Hidden states that the pipeline reads; diffusers' training script takes 10, 20 and 30 unless it is given these."""
_WIDTHS = {3072: "4B", 4096: "9B"}
"""Names of the published models by the width of their transformer."""


def _size(network: Any) -> str:
    """4B or 9B; the name of the family alone for a transformer of another width."""
    return _WIDTHS.get(network.config.num_attention_heads * network.config.attention_head_dim, "")


def _architecture(network: nn.Module, prediction: str) -> Architecture | None:
    size = _size(network).lower()
    return Architecture(f"flux-2-klein-{size}") if size else None


TRANSFORMER = replace(flux2_transformer.TRANSFORMER, architecture=_architecture)
FACTS: dict[type, Facts] = {Flux2Transformer2DModel: TRANSFORMER, AutoencoderKLFlux2: KL_AUTOENCODER, **TEXT_ENCODERS}


class Settings(TransformerSettings, ReferenceSettings, DistilledSettings):
    """FLUX.2 klein, base or distilled."""

    family: Literal["flux2"] = "flux2"
    """Name of the family."""
    text_encoder: Component = BASE
    """The language model: Qwen3 4B or 8B."""
    max_sequence_length: int = Field(512, ge=1, le=2048)
    """Tokens of a caption in its template: shorter ones are padded, and the transformer attends to the padding; longer
    ones are cut. The models were made with 512."""
    text_encoder_out_layers: list[int] = Field(_LAYERS, min_length=1)
    """Hidden states of the language model that are read side by side; 0 are the embeddings."""
    sample_posterior: bool = False
    """Draw a latent from the autoencoder's posterior for each sample and epoch; off, as diffusers' script trains it:
    take the posterior's mean."""

    pipeline_class: ClassVar[str] = "Flux2KleinPipeline"
    schedulers: ClassVar[Schedulers] = FlowMatching(token_px=16, empirical=True)
    guidance: ClassVar[Guidance] = CLASSIFIER_FREE
    reference_rule: ClassVar[References] = References(most=10)
    usual: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "data": {"resolution": 1024},
        "sampling": {"guidance_scale": 4.0, "num_inference_steps": 50},
    }

    @classmethod
    def usual_of(cls, configs: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        """Four steps without guidance for the distilled models."""
        if not configs.get(INDEX, {}).get("is_distilled"):
            return cls.usual
        return {**cls.usual, "sampling": {"guidance_scale": 1.0, "num_inference_steps": 4}}


def load(settings: Settings, seed: int) -> Family:
    """The family of these settings. Raises UserError if something is missing or does not fit together."""
    components = ComponentLoader(settings, seed)
    autoencoder = vae.load(components, AutoencoderKLFlux2.__name__)
    layers = tuple(settings.text_encoder_out_layers)
    reading = replace(_READS, max_tokens=settings.max_sequence_length, layers=layers)
    encoder = text_encoder.load(components, "text_encoder", "tokenizer", reading)
    texts = TextConditioning((encoder,))
    decided = {"in_channels": autoencoder.channels, "joint_attention_dim": texts.width, "guidance_embeds": False}
    transformer = components.network("transformer", Flux2Transformer2DModel, decided, FLUX2)
    if transformer.config.guidance_embeds:
        raise UserError(
            "model.transformer is given its guidance as a number, as FLUX.2 dev is: this family is FLUX.2 klein, "
            "such as black-forest-labs/FLUX.2-klein-base-4B",
            code="unsupported",
            setting="model.transformer",
        )
    check_fits("transformer", transformer, decided)
    distilled = components.is_distilled
    # How long the stretches of a fused layer are follows from the numbers of this transformer.
    known = replace(TRANSFORMER, axes=flux2_axes(transformer))
    read = f"text_encoder_out_layers={layers}"
    return trained_net.family(
        components,
        partial(flux2_transformer.denoise, transformer),
        {"transformer": transformer, "vae": autoencoder.net},
        {"transformer": known, "vae": KL_AUTOENCODER},
        autoencoder,
        texts,
        PipelineExporter(
            settings,
            {"is_distilled": distilled},
            {},
            notices=() if [*layers] == _LAYERS else (f"give the call of the pipeline {read}, or images differ",),
            unknown=("negative_prompt", "guidance_rescale", "eta"),
        ),
        guidance=Unguided() if distilled else Settings.guidance,
        distilled=f"black-forest-labs/FLUX.2-klein-base-{_size(transformer) or '4B'}" if distilled else "",
    )
