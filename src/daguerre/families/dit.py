"""A diffusion transformer of any size: FLUX.2's architecture on the latents of a KL autoencoder, with CLIP's or T5's
tokens and with reference images.

Peebles and Xie 2023 (arXiv 2212.09748) for transformers on patches of latents; the blocks, positions and reference
images are those of FLUX.2 klein (families/flux2.py). There are no published weights: it is trained from random ones by
flow matching, on the autoencoder and text encoder of any Stable Diffusion 1.x or 2.x, or of the quickstart.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from diffusers import Flux2Transformer2DModel
from pydantic import Field
from torch import nn

from daguerre.errors import UserError
from daguerre.models import trained_net
from daguerre.models.components import ComponentLoader, check_fits
from daguerre.models.export.diffusers import PipelineExporter
from daguerre.models.family import Family
from daguerre.models.network import Architecture
from daguerre.models.parts import flux2_transformer, vae
from daguerre.models.parts.facts import KL_AUTOENCODER
from daguerre.models.parts.flux_names import FLUX2
from daguerre.models.parts.flux_transformer import flux2_axes
from daguerre.models.parts.settings import TransformerSettings
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.reading import Reading
from daguerre.models.schedulers.flow_matching import FlowMatching
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.models.settings import ReferenceSettings
from daguerre.samplers.guidance import CLASSIFIER_FREE, Guidance
from daguerre.types import References

_TOLD = ("patch_size", "max_sequence_length")
"""Settings that the index of an export says."""
_EXAMPLE = """\
# diffusers has no pipeline of these networks, and opens each by itself; images are made by
#     daguerre generate path/to/this/folder prompt="a prompt"
from diffusers import AutoencoderKL, Flux2Transformer2DModel

transformer = Flux2Transformer2DModel.from_pretrained("path/to/this/folder", subfolder="transformer")
vae = AutoencoderKL.from_pretrained("path/to/this/folder", subfolder="vae")
"""


class Settings(TransformerSettings, ReferenceSettings):
    """A diffusion transformer of given numbers."""

    family: Literal["dit"] = "dit"
    """Name of the family."""
    patch_size: int = Field(2, ge=1, le=8)
    """Side in latent pixels of a token: half of it makes four times as many tokens."""
    max_sequence_length: int | None = Field(None, ge=2, le=2048)
    """Tokens of a caption: shorter ones are padded, and the transformer attends to the padding; longer ones are cut.
    null: as many as the tokenizer says."""
    sample_posterior: bool = False
    """Draw a latent from the autoencoder's posterior for each sample and epoch; off, as FLUX.2 has it: take the
    posterior's mean."""

    pipeline_class: ClassVar[str] = "DaguerreDiTPipeline"
    schedulers: ClassVar[Schedulers] = FlowMatching(token_px=16)
    guidance: ClassVar[Guidance] = CLASSIFIER_FREE
    reference_rule: ClassVar[References] = References(most=10, sizing=None)
    told_by_index: ClassVar[Mapping[str, str]] = {name: name for name in _TOLD}
    usual: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "data": {"resolution": 256},
        "sampling": {"guidance_scale": 4.0, "num_inference_steps": 50},
    }


def load(settings: Settings, seed: int) -> Family:
    """The family of these settings. Raises UserError if something is missing or does not fit together."""
    components = ComponentLoader(settings, seed)
    patch = settings.patch_size
    autoencoder = vae.load(components, patch=patch)
    reading = Reading(max_tokens=settings.max_sequence_length)
    encoder = text_encoder.load(components, "text_encoder", "tokenizer", reading)
    texts = TextConditioning((encoder,))
    decided = {
        "patch_size": patch,
        "in_channels": patch**2 * autoencoder.channels,
        "out_channels": autoencoder.channels,
        "joint_attention_dim": texts.width,
        "guidance_embeds": False,
    }
    transformer = components.network("transformer", Flux2Transformer2DModel, decided, FLUX2)
    check_fits("transformer", transformer, decided)
    _check_positions(transformer.config)
    # How long the stretches of a fused layer are follows from the numbers of this transformer.
    known = replace(flux2_transformer.TRANSFORMER, axes=flux2_axes(transformer), architecture=_architecture)
    # A reference image is made of whole tokens, as the image is.
    token_px = patch * vae.factor(autoencoder.net)
    rule = replace(settings.reference_rule, step_px=token_px)
    return trained_net.family(
        components,
        partial(flux2_transformer.denoise, transformer),
        {"transformer": transformer, "vae": autoencoder.net},
        {"transformer": known, "vae": KL_AUTOENCODER},
        autoencoder,
        texts,
        PipelineExporter(
            settings,
            {name: getattr(settings, name) for name in _TOLD},
            {},
            notices=("diffusers has no pipeline of these networks: use `daguerre generate`",),
            example=_EXAMPLE,
        ),
        references=replace(rule, most=settings.references) if settings.references else None,
        prompt_references=rule,
    )


def _architecture(network: nn.Module, prediction: str) -> Architecture:
    return Architecture("dit")


def _check_positions(config: Any) -> None:
    """UserError for a transformer whose places (time, row, column, and place in the text) do not fill a head."""
    if sum(config.axes_dims_rope) != config.attention_head_dim or any(dim % 2 for dim in config.axes_dims_rope):
        raise UserError(
            f"model.transformer has heads of {config.attention_head_dim} features, and axes_dims_rope "
            f"{[*config.axes_dims_rope]} shares out {sum(config.axes_dims_rope)}: give four even numbers with that "
            "sum, of time, row, column and place in the text",
            code="conflict",
            setting="model.transformer",
        )
