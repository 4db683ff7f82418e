"""Z-Image: one stream of image and text tokens, conditioned on a language model's hidden states.

Tongyi-MAI 2025 (https://huggingface.co/Tongyi-MAI/Z-Image). Trained by flow matching: the network is given 1 - s and
predicts the velocity with the opposite sign, in diffusers' notation. Shape letters: B samples, C channels, H and W
height and width of latents, T tokens, D features.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from diffusers import ZImageTransformer2DModel
from pydantic import Field
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.models import trained_net
from daguerre.models.components import ComponentLoader, check_fits
from daguerre.models.controlnets.controlled import Residuals
from daguerre.models.export.diffusers import PipelineExporter
from daguerre.models.family import Family
from daguerre.models.network import HEAD, Architecture, Facts, layers
from daguerre.models.parts import vae
from daguerre.models.parts.facts import KL_AUTOENCODER, TEXT_ENCODERS
from daguerre.models.parts.settings import TransformerSettings
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.parts.z_image import PATCH, TextToImage
from daguerre.models.reading import Reading
from daguerre.models.schedulers.flow_matching import FlowMatching
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.models.settings import BASE, INDEX, SCHEDULER, Component, DistilledSettings
from daguerre.models.weights.original_names import NameTable
from daguerre.samplers.guidance import ClassifierFree, Guidance
from daguerre.types import Cond

_READS = Reading(
    kinds=("language_model",), template="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    padding="longest", masked=True, text_mask=True, layers=(-2,), final_norm=False,
)  # fmt: skip
"""ZImagePipeline reads the last hidden state but one of a user's turn, and leaves padding out."""
_MARK = "_is_distilled"
"""In the index of an export: diffusers leaves names with a first underscore alone."""
_DISTILLED_SHIFT = 3.0
"""Of Turbo's scheduler, its only mark: the base's has 6."""


def _architecture(network: nn.Module, prediction: str) -> Architecture:
    return Architecture("z-image", {"ss_base_model_version": "zimage"})


_BLOCKS = ("layers", "noise_refiner", "context_refiner")
NAMES = NameTable(
    {
        "x_embedder": "all_x_embedder.2-1",
        "final_layer.linear": "all_final_layer.2-1.linear",
        "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
        **{f"{block}.*.attention.qkv": tuple(f"{block}.*.attention.to_{part}" for part in "qkv") for block in _BLOCKS},
        **{
            f"{block}.*.attention.{original}": f"{block}.*.attention.{layer}"
            for block in _BLOCKS
            for original, layer in (("out", "to_out.0"), ("q_norm", "norm_q"), ("k_norm", "norm_k"))
        },
    },
    others=True,
)
"""Tongyi's and ComfyUI's names of the transformer."""
TRANSFORMER = Facts(
    blocks=("ZImageTransformerBlock",),
    axes={
        **layers(("embed", None), "all_x_embedder.*", "cap_embedder.1"),
        **layers((None, "embed"), "all_final_layer.*.linear", "*.adaLN_modulation.?"),
        **layers(("time", None), "t_embedder.mlp.*"),
        **layers(("heads", "embed"), "*.attention.to_[qkv]"),
        **layers(("embed", "heads"), "*.attention.to_out.0"),
        **layers(("mlp", "embed"), "*.feed_forward.w[13]"),
        **layers(("embed", "mlp"), "*.feed_forward.w2"),
        "*.attention.norm_[qk].weight": (HEAD,),
        "*_norm?.weight": ("norm",),
        "cap_embedder.0.weight": ("norm",),
        "*_pad_token": (None, "embed"),
    },
    heads="heads",
    layers={
        "attention": ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"),
        "ff": ("feed_forward.w?",),
    },
    readers=(("attention", "to_q", "to_k", "to_v"), ("feed_forward", "w1", "w3")),
    names=NAMES,
    architecture=_architecture,
)
FACTS: dict[type, Facts] = {TextToImage: TRANSFORMER, ZImageTransformer2DModel: TRANSFORMER, **TEXT_ENCODERS}


class Settings(TransformerSettings, DistilledSettings):
    """Z-Image."""

    family: Literal["z_image"] = "z_image"
    """Name of the family."""
    text_encoder: Component = BASE
    """The language model: Qwen3."""
    max_sequence_length: int = Field(512, ge=1, le=2048)
    """Tokens that are read of a caption in its template; longer ones are cut."""
    is_distilled: bool | None = None
    """Whether the transformer was distilled to few steps, as Turbo was: it generates, and is not trained. null: as the
    base's scheduler says, which has a shift of 3 in Turbo and says nothing of a transformer from elsewhere."""
    sample_posterior: bool = False
    """Draw a latent from the autoencoder's posterior for each sample and epoch; off, as diffusers' script trains it:
    take the posterior's mean."""

    pipeline_class: ClassVar[str] = "ZImagePipeline"
    schedulers: ClassVar[Schedulers] = FlowMatching(token_px=16)
    guidance: ClassVar[Guidance] = ClassifierFree(off=0.0)
    usual: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "data": {"resolution": 1024},
        "sampling": {"guidance_scale": 4.0, "num_inference_steps": 50},
    }

    @classmethod
    def usual_of(cls, configs: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        """Eight steps without guidance for Turbo."""
        few = {"guidance_scale": 0.0, "num_inference_steps": 8}
        marked = _is_marked(configs.get(INDEX, {}), configs.get(SCHEDULER, {}))
        return {**cls.usual, "sampling": few} if marked else cls.usual


def load(settings: Settings, seed: int) -> Family:
    """The family of these settings. Raises UserError if something is missing or does not fit together."""
    components = ComponentLoader(settings, seed)
    autoencoder = vae.load(components, patch=PATCH)
    reading = replace(_READS, max_tokens=settings.max_sequence_length)
    encoder = text_encoder.load(components, "text_encoder", "tokenizer", reading)
    texts = TextConditioning((encoder,))
    decided = {"in_channels": autoencoder.channels, "cap_feat_dim": texts.width}
    transformer = components.network("transformer", TextToImage, decided, NAMES)
    check_fits("transformer", transformer, decided)
    if settings.max_sequence_length > transformer.most_tokens:
        raise UserError(
            f"model.max_sequence_length is {settings.max_sequence_length}, and the transformer has places for "
            f"{transformer.most_tokens} tokens: set that or less",
            setting="model.max_sequence_length",
        )
    told = settings.is_distilled
    if told is None:
        told = settings.transformer == BASE and _is_marked(components.index, components.scheduler() or {})
    return trained_net.family(
        components,
        partial(denoise, transformer),
        {"transformer": transformer, "vae": autoencoder.net},
        {"transformer": TRANSFORMER, "vae": KL_AUTOENCODER},
        replace(autoencoder, most_tokens=transformer.most_side),
        texts,
        PipelineExporter(settings, {_MARK: told}, {}),
        distilled="Tongyi-MAI/Z-Image" if told else "",
    )


def _is_marked(index: Mapping[str, Any], scheduler: Mapping[str, Any]) -> bool:
    """True for a pipeline of Turbo, by its index or else its scheduler."""
    return bool(index.get(_MARK, scheduler.get("shift") == _DISTILLED_SHIFT))


def denoise(transformer: Any, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Residuals = ()) -> Tensor:
    """The velocity [B, C, H, W] of noisy latents. `cond` has `text` [B, T, D], and `text_mask` [B, T] where texts of a
    batch differ in length."""
    y: Tensor = transformer(x_BCHW, c_noise_B, cond["text"], cond.get("text_mask"))
    return -y
