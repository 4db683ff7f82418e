"""Qwen-Image: a transformer with a stream of text and one of image tokens, and attention over both.

Qwen 2025 (arXiv 2508.02324, https://huggingface.co/Qwen/Qwen-Image, and -2512). Trained by flow matching on the hidden
states of Qwen2.5-VL. Shape letters: B samples, C channels, H and W height and width of latents, T tokens, D features.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from diffusers import QwenImageTransformer2DModel
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate

from daguerre.errors import UserError
from daguerre.models import trained_net
from daguerre.models.components import ComponentLoader, check_fits
from daguerre.models.controlnets.controlled import Residuals
from daguerre.models.export.diffusers import TRUE_CFG, PipelineExporter
from daguerre.models.family import Family
from daguerre.models.network import HEAD, Architecture, Facts, layers
from daguerre.models.parts import vae
from daguerre.models.parts.flux2_vae import patched, unpatched
from daguerre.models.parts.settings import TransformerSettings
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.reading import Reading
from daguerre.models.schedulers.flow_matching import FlowMatching
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.models.settings import BASE, Component
from daguerre.models.weights.original_names import NameTable
from daguerre.samplers.guidance import ClassifierFree, Guidance
from daguerre.types import Cond

_PATCH = 2
"""Side of the square of latent pixels that is one token."""
_SYSTEM = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n"
)
_READS = Reading(
    kinds=("language_model",), template=f"{_SYSTEM}<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n",
    dropped=34, padding="longest", masked=True, text_mask=True,
)  # fmt: skip
"""QwenImagePipeline leaves out the system's turn, and the beginning of the user's."""


@dataclass(frozen=True)
class NormKept(ClassifierFree):
    """Classifier-free guidance behind which each token is as long as that of the prompt's side, as the pipeline has."""

    def combine(self, y_cond_BCHW: Tensor, y_null_BCHW: Tensor, scale_B111: Tensor) -> Tensor:
        y_BCHW = super().combine(y_cond_BCHW, y_null_BCHW, scale_B111)
        return y_BCHW * (_lengths(y_cond_BCHW) / _lengths(y_BCHW))


def _lengths(y_BCHW: Tensor) -> Tensor:
    """[B, 1, H, W]: the norm of the token that each pixel belongs to, but for a factor."""
    squares = avg_pool2d(y_BCHW.square().sum(1, keepdim=True), _PATCH)
    return interpolate(squares.sqrt(), scale_factor=_PATCH)


def _architecture(network: nn.Module, prediction: str) -> Architecture:
    return Architecture("qwen-image", (1328, 1328), {"ss_base_model_version": "qwen_image"})


_BLOCK = "transformer_blocks.*."
NAMES = NameTable({}, others=True)
"""The authors' and ComfyUI's names of the transformer are the library's."""
TRANSFORMER = Facts(
    blocks=("QwenImageTransformerBlock",),
    axes={
        **layers(("embed", None), "img_in", "txt_in"),
        **layers(("time", None), "time_text_embed.timestep_embedder.linear_?"),
        **layers((None, "embed"), f"{_BLOCK}*_mod.1", "norm_out.linear", "proj_out"),
        **layers(("heads", "embed"), f"{_BLOCK}attn.to_[qkv]", f"{_BLOCK}attn.add_[qkv]_proj"),
        **layers(("embed", "heads"), f"{_BLOCK}attn.to_out.0", f"{_BLOCK}attn.to_add_out"),
        **layers(("mlp", "embed"), f"{_BLOCK}*_mlp.net.0.proj"),
        **layers(("embed", "mlp"), f"{_BLOCK}*_mlp.net.2"),
        f"{_BLOCK}attn.norm_*.weight": (HEAD,),
        "txt_norm.weight": ("norm",),
    },
    layers={
        "attention": ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        "ff": ("img_mlp.net.*", "txt_mlp.net.*"),
    },
    readers=(("attn", "to_q", "to_k", "to_v"), ("attn", "add_q_proj", "add_k_proj", "add_v_proj")),
    names=NAMES,
    architecture=_architecture,
)
FACTS: dict[type, Facts] = {QwenImageTransformer2DModel: TRANSFORMER}
_LAST_OF_TEXT = ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
"""Layers of the last block that only its text comes out of, which nothing reads."""


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
    autoencoder = vae.load(components, "AutoencoderKLQwenImage", _PATCH)
    reading = replace(_READS, max_tokens=settings.max_sequence_length)
    encoder = text_encoder.load(components, "text_encoder", "tokenizer", reading)
    text_encoder.check_kind(encoder, "qwen2_5_vl", "Qwen2.5-VL 7B")
    texts = TextConditioning((encoder,), null=" ")
    decided = {"in_channels": _PATCH**2 * autoencoder.channels, "out_channels": autoencoder.channels}
    decided |= {"joint_attention_dim": texts.width}
    transformer = components.network("transformer", QwenImageTransformer2DModel, decided, NAMES)
    check_fits("transformer", transformer, decided)
    if transformer.config.zero_cond_t:
        raise UserError(
            "model.transformer is one of Qwen-Image-Edit-2511 (zero_cond_t in its config), which was trained with "
            "reference images alone, and this family reads none: take Qwen/Qwen-Image-2512",
            code="unsupported",
            setting="model.transformer",
        )
    return trained_net.family(
        components,
        partial(denoise, transformer),
        {"transformer": transformer, "vae": autoencoder.net},
        {"transformer": replace(TRANSFORMER, unread=_unread(transformer))},
        autoencoder,
        texts,
        PipelineExporter(settings, {}, {}, **TRUE_CFG),
        guidance=Settings.guidance,
    )


def _unread(transformer: Any) -> frozenset[str]:
    last = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}."
    own = tuple(f"{last}{layer}." for layer in _LAST_OF_TEXT)
    return frozenset(name for name, _ in transformer.named_parameters() if name.startswith(own))


def denoise(transformer: Any, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Residuals = ()) -> Tensor:
    """The velocity [B, C, H, W] of noisy latents: packs 2 x 2 pixels to a token, and back. `cond` has `text` [B, T, D],
    and `text_mask` [B, T] where texts of a batch differ in length."""
    tokens_BCHW = patched(x_BCHW)
    height, width = tokens_BCHW.shape[2:]
    y_BLC = transformer(
        hidden_states=tokens_BCHW.flatten(2).transpose(1, 2),
        timestep=c_noise_B,
        encoder_hidden_states=cond["text"],
        encoder_hidden_states_mask=cond.get("text_mask"),
        img_shapes=[[(1, height, width)]] * len(x_BCHW),
        return_dict=False,
    )[0]
    return unpatched(y_BLC.transpose(1, 2).unflatten(2, (height, width)))
