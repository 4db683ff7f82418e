"""FLUX.1: a transformer on packed latents with joint attention to T5's tokens, and CLIP's pooled features.

Black Forest Labs 2024 (https://github.com/black-forest-labs/flux). `dev` was distilled with guidance inside, as an
embedded number; `schnell` also to few steps. The transformer is trained by flow matching; the text encoders may be.
Shape letters: B samples, C channels, H and W height and width of latents, T tokens, D features.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from diffusers import FluxTransformer2DModel
from pydantic import Field
from torch import Tensor, nn

from daguerre.models import trained_net
from daguerre.models.components import ComponentLoader, check_fits
from daguerre.models.controlnets.controlled import Residuals
from daguerre.models.export.diffusers import PipelineExporter
from daguerre.models.family import Family
from daguerre.models.network import Architecture, Facts
from daguerre.models.parts import vae
from daguerre.models.parts.facts import KL_AUTOENCODER, TEXT_ENCODERS
from daguerre.models.parts.flux_names import FLUX
from daguerre.models.parts.flux_transformer import flux_axes
from daguerre.models.parts.settings import TransformerSettings
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.reading import Reading
from daguerre.models.schedulers.flow_matching import FlowMatching
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.models.settings import BASE, Component, ComponentSpec
from daguerre.samplers.guidance import Embedded, Guidance, Unguided
from daguerre.settings import ADDRESS
from daguerre.types import Batch, Cond

_PATCH = 2
"""Side of the square of latent pixels that is one token."""
_POOLED = Reading(kinds=("clip",), text=None, pooled="plain")
"""FluxPipeline reads of CLIP the pooled features alone, without its projection."""


def _architecture(network: nn.Module, prediction: str) -> Architecture:
    config: Any = network.config
    return Architecture(f"flux-1-{'dev' if config.guidance_embeds else 'schnell'}", {"ss_base_model_version": "flux1"})


TRANSFORMER = Facts(
    blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    heads="heads",
    layers={
        "attention": ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_?_proj", "attn.to_add_out"),
        "ff": ("ff.net.*", "ff_context.net.*", "proj_mlp", "single_transformer_blocks.*.proj_out"),
    },
    readers=(("attn", "to_q", "to_k", "to_v"), ("attn", "add_q_proj", "add_k_proj", "add_v_proj")),
    names=FLUX,
    architecture=_architecture,
)
FACTS: dict[type, Facts] = {FluxTransformer2DModel: TRANSFORMER, **TEXT_ENCODERS}


class Settings(TransformerSettings):
    """FLUX.1 dev or schnell."""

    family: Literal["flux"] = "flux"
    """Name of the family."""
    text_encoder_2: Component = BASE
    """T5, whose tokens the transformer attends to; `text_encoder` is CLIP, of which it reads pooled features."""
    tokenizer_2: Annotated[str, ADDRESS] = BASE
    """The tokenizer of T5."""
    max_sequence_length: int = Field(512, ge=1, le=512)
    """Tokens of T5 for a caption: shorter ones are padded, longer ones cut. schnell was made with 256."""
    training_guidance: float = Field(1.0, ge=0, allow_inf_nan=False)
    """The embedded guidance scale that dev is trained with: 1 keeps what the data are like (diffusers' script: 3.5).
    Of images it is `sampling.guidance_scale`."""

    pipeline_class: ClassVar[str] = "FluxPipeline"
    schedulers: ClassVar[Schedulers] = FlowMatching(token_px=16)
    guidance: ClassVar[Guidance] = Embedded()
    usual: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "data": {"resolution": 1024},
        "sampling": {"guidance_scale": 3.5, "num_inference_steps": 28},
    }
    components: ClassVar[Mapping[str, ComponentSpec]] = {
        **TransformerSettings.components,
        "text_encoder_2": ComponentSpec("text_encoder", trainable=True),
        "tokenizer_2": ComponentSpec("tokenizer"),
    }

    @classmethod
    def usual_of(cls, configs: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        """Four steps without guidance for schnell, whose transformer has no embedded guidance."""
        if configs.get("transformer", {}).get("guidance_embeds", True):
            return cls.usual
        return {**cls.usual, "sampling": {"guidance_scale": 0.0, "num_inference_steps": 4}}


def load(settings: Settings, seed: int) -> Family:
    """The family of these settings. Raises UserError if something is missing or does not fit together."""
    components = ComponentLoader(settings, seed)
    autoencoder = vae.load(components, patch=_PATCH)
    clip = text_encoder.load(components, "text_encoder", "tokenizer", _POOLED)
    t5 = text_encoder.load(
        components, "text_encoder_2", "tokenizer_2", Reading(kinds=("t5",), max_tokens=settings.max_sequence_length)
    )
    texts = TextConditioning((clip, t5))
    decided = {
        "in_channels": _PATCH**2 * autoencoder.channels,
        "joint_attention_dim": t5.width,
        "pooled_projection_dim": clip.width,
    }
    transformer = components.network("transformer", FluxTransformer2DModel, decided, FLUX)
    check_fits("transformer", transformer, decided)
    # How long the stretches of a fused layer are follows from the numbers of this transformer.
    known = replace(TRANSFORMER, axes=flux_axes(transformer))
    takes_guidance = transformer.config.guidance_embeds

    def training_guidance(batch: Batch) -> Cond:
        return {"guidance": torch.full((len(batch.names),), settings.training_guidance)} if takes_guidance else {}

    return trained_net.family(
        components,
        partial(denoise, transformer),
        {"transformer": transformer, "vae": autoencoder.net},
        {"transformer": known, "vae": KL_AUTOENCODER},
        autoencoder,
        texts,
        PipelineExporter(settings, {}, {}),
        batch_numbers=training_guidance,
        guidance=Settings.guidance if takes_guidance else Unguided(),
        distilled="" if takes_guidance else "black-forest-labs/FLUX.1-dev",
    )


def denoise(transformer: Any, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Residuals = ()) -> Tensor:
    """The velocity [B, C, H, W] of noisy latents: packs 2 x 2 pixels to a token, and back.

    `cond` has `text` [B, T, D], `pooled` [B, P] and, where the network takes it, `guidance` [B].
    """
    b, c, h, w = x_BCHW.shape
    rows, columns = h // _PATCH, w // _PATCH
    packed = x_BCHW.view(b, c, rows, _PATCH, columns, _PATCH).permute(0, 2, 4, 1, 3, 5)
    y = transformer(
        hidden_states=packed.reshape(b, rows * columns, c * _PATCH**2),
        timestep=c_noise_B,
        guidance=cond.get("guidance"),
        pooled_projections=cond["pooled"],
        encoder_hidden_states=cond["text"],
        txt_ids=torch.zeros(cond["text"].shape[1], 3, device=x_BCHW.device),
        img_ids=_positions(rows, columns, x_BCHW.device),
        return_dict=False,
    )[0]
    unpacked = y.view(b, rows, columns, c, _PATCH, _PATCH).permute(0, 3, 1, 4, 2, 5)
    return unpacked.reshape(b, c, h, w)


def _positions(rows: int, columns: int, device: torch.device) -> Tensor:
    """[rows * columns, 3]: 0, row and column of each token. Made on the device, so that nothing waits for a copy."""
    row = torch.arange(rows, device=device)[:, None].expand(rows, columns)
    column = torch.arange(columns, device=device)[None].expand(rows, columns)
    return torch.stack([torch.zeros_like(row), row, column], -1).reshape(-1, 3).float()
