"""Krea 2: one stream of image and text tokens, conditioned on twelve hidden states of a language model.

Krea 2026 (https://huggingface.co/krea/Krea-2-Raw). Trained by flow matching: the network is given the time s and
predicts the velocity. Turbo was distilled to few steps and is sampled from. Shape letters: B samples, C channels, H and
W height and width of latents, T tokens, K hidden states, D features.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from diffusers import Krea2Transformer2DModel
from pydantic import Field
from torch import Tensor, nn

from daguerre.models import trained_net
from daguerre.models.components import ComponentLoader, check_fits
from daguerre.models.controlnets.controlled import Residuals
from daguerre.models.export.diffusers import PipelineExporter
from daguerre.models.family import Family
from daguerre.models.network import HEAD, Architecture, Facts, layers
from daguerre.models.parts import vae
from daguerre.models.parts.facts import TEXT_ENCODERS
from daguerre.models.parts.flux2_vae import patched, unpatched
from daguerre.models.parts.settings import TransformerSettings
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.reading import Reading
from daguerre.models.schedulers.flow_matching import FlowMatching
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.models.settings import BASE, INDEX, Component, DistilledSettings
from daguerre.models.weights.original_names import NameTable
from daguerre.samplers.guidance import ClassifierFree, Guidance
from daguerre.types import Cond

_PATCH = 2
"""Side of the square of latent pixels that is one token."""
_SYSTEM = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:"
)
_READS = Reading(
    kinds=("language_model",),
    template=f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n",
    dropped=34, kept=5, padding="longest", masked=True, text_mask=True, final_norm=False,
)  # fmt: skip
"""Krea2Pipeline drops the system's turn. It fills captions up before the turn's end, with places that count real tokens
alone and a mask in both networks: so the same as no padding, and as padding behind."""
_LAYERS = [*range(2, 36, 3)]
"""The hidden states of Qwen3-VL that Krea2Pipeline reads."""
_DISTILLED_SHIFT = math.exp(1.15)
"""The shift with which the pipeline of distilled weights samples at every size."""


def _architecture(network: nn.Module, prediction: str) -> Architecture:
    return Architecture("krea-2", {"ss_base_model_version": "krea2"})


_STACKS = {
    "blocks": "transformer_blocks",
    "txtfusion.layerwise_blocks": "text_fusion.layerwise_blocks",
    "txtfusion.refiner_blocks": "text_fusion.refiner_blocks",
}
_IN_BLOCKS = {
    **{f"attn.w{part}": f"attn.to_{part}" for part in "qkv"},
    "attn.wo": "attn.to_out.0",
    "attn.gate": "attn.to_gate",
    "attn.qknorm.qnorm": "attn.norm_q",
    "attn.qknorm.knorm": "attn.norm_k",
    **{f"mlp.{part}": f"ff.{part}" for part in ("gate", "up", "down")},
    "prenorm": "norm1",
    "postnorm": "norm2",
}
_NORMS = ("attn.qknorm.qnorm", "attn.qknorm.knorm", "prenorm", "postnorm")
NAMES = NameTable(
    {
        "first": "img_in",
        "tmlp.0": "time_embed.linear_1",
        "tmlp.2": "time_embed.linear_2",
        "tproj.1": "time_mod_proj",
        "txtmlp.0": "txt_in.norm",
        "txtmlp.1": "txt_in.linear_1",
        "txtmlp.3": "txt_in.linear_2",
        "txtfusion.projector": "text_fusion.projector",
        "last.norm": "final_layer.norm",
        "last.linear": "final_layer.linear",
        **{f"{a}.*.{original}": f"{b}.*.{layer}" for a, b in _STACKS.items() for original, layer in _IN_BLOCKS.items()},
    },
    scales=frozenset({"txtmlp.0", "last.norm", *(f"{stack}.*.{norm}" for stack in _STACKS for norm in _NORMS)}),
    parameters={
        "blocks.*.mod.lin": "transformer_blocks.*.scale_shift_table",
        "last.modulation.lin": "final_layer.scale_shift_table",
    },
    flat=frozenset({"blocks.*.mod.lin"}),
)
"""Krea's and ComfyUI's names of the transformer."""
TRANSFORMER = Facts(
    blocks=("Krea2TransformerBlock", "Krea2TextFusionBlock"),
    axes={
        **layers(("embed", None), "img_in", "txt_in.linear_?"),
        **layers((None, "embed"), "time_mod_proj", "final_layer.linear", "text_fusion.projector"),
        **layers(("time", None), "time_embed.linear_?"),
        **layers(("heads", "embed"), "*.attn.to_[qkv]", "*.attn.to_gate"),
        **layers(("embed", "heads"), "*.attn.to_out.0"),
        **layers(("mlp", "embed"), "*.ff.gate", "*.ff.up"),
        **layers(("embed", "mlp"), "*.ff.down"),
        "*.attn.norm_[qk].weight": (HEAD,),
        "*.norm[12].weight": ("norm",),
        "*.norm.weight": ("norm",),
        "*.scale_shift_table": (None, "embed"),
    },
    heads="num_heads",
    kv_heads="num_kv_heads",
    layers={
        "attention": ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_gate", "attn.to_out.0"),
        "ff": ("ff.gate", "ff.up", "ff.down"),
    },
    readers=(
        ("transformer_blocks.*.attn", "to_q", "to_gate"),
        ("transformer_blocks.*.attn", "to_k", "to_v"),
        ("text_fusion.*.attn", "to_q", "to_k", "to_v", "to_gate"),
        ("ff", "gate", "up"),
    ),
    names=NAMES,
    unknown_to_diffusers=("*",),
    architecture=_architecture,
    float32=("*.norm.weight", "*.norm?.weight", "*.norm_[qk].weight"),
)
FACTS: dict[type, Facts] = {Krea2Transformer2DModel: TRANSFORMER, **TEXT_ENCODERS}


class Settings(TransformerSettings, DistilledSettings):
    """Krea 2."""

    family: Literal["krea2"] = "krea2"
    """Name of the family."""
    text_encoder: Component = BASE
    """The language model: Qwen3-VL, of which the part that reads text is used."""
    text_encoder_select_layers: list[int] = Field(_LAYERS, min_length=1)
    """Hidden states of the text encoder that the transformer reads, 0 being the embeddings."""
    max_sequence_length: int = Field(512, ge=6, le=2048)
    """Tokens that are read of a caption in its turn; longer ones are cut."""

    pipeline_class: ClassVar[str] = "Krea2Pipeline"
    schedulers: ClassVar[Schedulers] = FlowMatching(token_px=16)
    guidance: ClassVar[Guidance] = ClassifierFree(off=0.0)
    told_by_index: ClassVar[Mapping[str, str]] = {"text_encoder_select_layers": "text_encoder_select_layers"}
    usual: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "data": {"resolution": 1024},
        "sampling": {"guidance_scale": 3.5, "num_inference_steps": 52},
    }

    @classmethod
    def usual_of(cls, configs: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        """Eight steps without guidance for Turbo, with the shift that its pipeline has at every size."""
        if not configs.get(INDEX, {}).get("is_distilled"):
            return cls.usual
        few = {"guidance_scale": 0.0, "num_inference_steps": 8, "shift": _DISTILLED_SHIFT}
        return {**cls.usual, "sampling": few}


def load(settings: Settings, seed: int) -> Family:
    """The family of these settings. Raises UserError if something is missing or does not fit together."""
    components = ComponentLoader(settings, seed)
    autoencoder = vae.load(components, "AutoencoderKLQwenImage", patch=_PATCH)
    chosen = tuple(settings.text_encoder_select_layers)
    reading = replace(_READS, max_tokens=settings.max_sequence_length, layers=chosen)
    encoder = text_encoder.load(components, "text_encoder", "tokenizer", reading)
    text_encoder.check_kind(encoder, "qwen3_vl", "Qwen3-VL 4B")
    texts = TextConditioning((encoder,))
    decided = {
        "in_channels": _PATCH**2 * autoencoder.channels,
        "text_hidden_dim": encoder.width // len(chosen),
        "num_text_layers": len(chosen),
    }
    transformer = components.network("transformer", Krea2Transformer2DModel, decided, NAMES)
    check_fits("transformer", transformer, decided)
    distilled = components.is_distilled
    index = {"text_encoder_select_layers": [*chosen], "patch_size": _PATCH, "is_distilled": distilled}
    return trained_net.family(
        components,
        partial(denoise, transformer),
        {"transformer": transformer, "vae": autoencoder.net},
        {"transformer": TRANSFORMER},
        autoencoder,
        texts,
        PipelineExporter(settings, index, {}),
        distilled="krea/Krea-2-Raw" if distilled else "",
    )


def denoise(transformer: Any, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Residuals = ()) -> Tensor:
    """The velocity [B, C, H, W] of noisy latents: packs 2 x 2 pixels to a token, and back.

    `cond` has `text` [B, T, K D], the hidden states side by side, and `text_mask` [B, T] where texts of a batch differ
    in length.
    """
    tokens = patched(x_BCHW)
    b, packed, rows, columns = tokens.shape
    text = cond["text"]
    y = transformer(
        hidden_states=tokens.flatten(2).mT,
        encoder_hidden_states=text.unflatten(-1, (transformer.config.num_text_layers, -1)),
        timestep=c_noise_B,
        position_ids=_places(text.shape[1], rows, columns, x_BCHW.device),
        encoder_attention_mask=cond.get("text_mask"),
        return_dict=False,
    )[0]
    return unpatched(y.mT.reshape(b, packed, rows, columns))


def _places(texts: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """[texts + rows * columns, 3]: zeros for text, then 0, row and column of each token of the image. Made on the
    device, so that nothing waits for a copy."""
    grid = torch.cartesian_prod(*(torch.arange(n, device=device) for n in (1, rows, columns)))
    return torch.cat([grid.new_zeros(texts, 3), grid]).float()
