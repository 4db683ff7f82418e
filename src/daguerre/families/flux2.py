"""FLUX.2 klein: a transformer on latents with joint attention to hidden states of Qwen3 and to reference images.

Black Forest Labs 2025 (https://github.com/black-forest-labs/flux2). The base models of 4B and 9B are trained by flow
matching; those without `base` in their name were distilled to few steps. Latents are 2 x 2 patches behind the
autoencoder's norm, one a token. Shape letters: B samples, C channels, H and W height and width of latents, T tokens, D
features.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from pydantic import Field
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.models import trained_net
from daguerre.models.components import ComponentLoader, check_fits
from daguerre.models.controlnets.controlled import Residuals
from daguerre.models.export.diffusers import PipelineExporter
from daguerre.models.family import Family, Moments
from daguerre.models.network import Architecture, Facts
from daguerre.models.parts import vae
from daguerre.models.parts.facts import KL_AUTOENCODER, TEXT_ENCODERS
from daguerre.models.parts.flux_names import FLUX2
from daguerre.models.parts.flux_transformer import flux2_axes
from daguerre.models.parts.settings import TransformerSettings
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.parts.vae import VAE
from daguerre.models.reading import Reading
from daguerre.models.schedulers.flow_matching import FlowMatching
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.models.settings import BASE, INDEX, Component, DistilledSettings, ReferenceSettings
from daguerre.samplers.guidance import CLASSIFIER_FREE, Guidance, Unguided
from daguerre.types import REFERENCES, Cond, References

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


def _architecture(network: nn.Module, prediction: str) -> Architecture:
    return Architecture("-".join(["flux-2-klein", _size(network).lower()]).rstrip("-"), (1024, 1024))


TRANSFORMER = Facts(
    blocks=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
    heads="heads",
    layers={
        "attention": (
            *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_?_proj", "attn.to_add_out"),
            *("attn.to_qkv_mlp_proj", "single_transformer_blocks.*.attn.to_out"),
        ),
        "ff": ("ff.linear_*", "ff_context.linear_*"),
    },
    readers=(("attn", "to_q", "to_k", "to_v"), ("attn", "add_q_proj", "add_k_proj", "add_v_proj")),
    names=FLUX2,
    unknown_to_diffusers=("*_stream_modulation*.linear", "norm_out.linear"),
    architecture=_architecture,
)
"""Layers of single blocks that are attention and feed-forward in one belong to attention."""
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
        partial(denoise, transformer),
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
        references=settings.trained_references,
        prompt_references=settings.reference_rule,
        reference_condition=partial(references, autoencoder),
        guidance=Unguided() if distilled else Settings.guidance,
        distilled=f"black-forest-labs/FLUX.2-klein-base-{_size(transformer) or '4B'}" if distilled else "",
    )


def denoise(transformer: Any, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Residuals = ()) -> Tensor:
    """The velocity [B, C, H, W] of noisy latents, one token each.

    `cond` has `text` [B, T, D], and latents [B, C, h, w] of reference images, whose tokens follow those of the image at
    times of their own, 10, 20, ... in place of its 0.
    """
    (h, w), device = x_BCHW.shape[2:], x_BCHW.device
    latents = [x_BCHW, *(cond[name].to(x_BCHW.dtype) for name in REFERENCES if name in cond)]
    y_BTC = transformer(
        hidden_states=torch.cat([z.flatten(2).transpose(1, 2) for z in latents], 1),
        timestep=c_noise_B,
        encoder_hidden_states=cond["text"],
        txt_ids=_text_positions(cond["text"].shape[1], device),
        img_ids=torch.cat([_positions(*z.shape[2:], time=10 * n, device=device) for n, z in enumerate(latents)]),
        return_dict=False,
    )[0]
    return y_BTC[:, : h * w].transpose(1, 2).unflatten(2, (h, w))


def references(autoencoder: VAE, moments: Moments) -> Cond:
    """The latents [B, C, h, w] of reference images, by name: the mean of the posterior, whatever is trained on."""
    of_mean = replace(autoencoder, sample_posterior=False)
    names = [name for name in REFERENCES if f"{name}.mean" in moments]
    return {name: of_mean.latents({"mean": moments[f"{name}.mean"]}, {}) for name in names}


def _text_positions(tokens: int, device: torch.device) -> Tensor:
    """[tokens, 4]: 0, 0, 0 and the token's number."""
    return nn.functional.pad(torch.arange(tokens, device=device)[:, None], (3, 0))


def _positions(rows: int, columns: int, *, time: int, device: torch.device) -> Tensor:
    """[rows * columns, 4]: time, row and column of each token, and 0. Made on the device, so that nothing waits for a
    copy."""
    row = torch.arange(rows, device=device)[:, None].expand(rows, columns)
    column = torch.arange(columns, device=device)[None].expand(rows, columns)
    return torch.stack([torch.full_like(row, time), row, column, torch.zeros_like(row)], -1).reshape(-1, 4)
