"""FLUX.3 klein: a transformer on latents, in which text, image and reference images have blocks of their own first.

Black Forest Labs 2026 (https://github.com/black-forest-labs/flux-3-image-klein). The base is trained by flow matching;
the model without `base` in its name is a flow map, which is also given the time at which a step ends. Latents are those
of FLUX.2. Shape letters: B samples, C channels, H and W height and width of latents, T tokens, D features.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from diffusers import AutoencoderKLFlux2, Flux3Transformer2DModel
from diffusers.models.transformers.transformer_flux3 import Flux3AttnProcessor
from pydantic import Field
from torch import Tensor, nn

from daguerre.models import trained_net
from daguerre.models.components import ComponentLoader, check_fits
from daguerre.models.controlnets.controlled import Residuals
from daguerre.models.export.diffusers import PipelineExporter
from daguerre.models.family import Family
from daguerre.models.network import HEAD, Architecture, Facts, Segment, layers
from daguerre.models.parts import vae
from daguerre.models.parts.settings import TransformerSettings
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.reading import Reading
from daguerre.models.schedulers.flow_matching import EULER, FlowMatching
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.models.settings import BASE, Component, ReferenceSettings
from daguerre.models.weights.original_names import NameTable
from daguerre.samplers.guidance import ClassifierFree, Guidance, Jumping
from daguerre.types import Cond, References

_READS = Reading(
    kinds=("language_model",), template="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    padding="longest", step=80, padding_place=1, masked=True, text_mask=True, final_norm=False,
)  # fmt: skip
"""Flux3ModularPipeline reads a user's turn, filled up to a multiple of 80 tokens. The padding is hidden from Qwen3-VL,
for which all of it has place 1, and not from the transformer."""
_LAYERS = [*range(4, 36, 4)]
"""The hidden states of Qwen3-VL that the pipeline reads."""
_SCALE = 0.5
"""Places of an image's tokens are rows and columns times this."""
_JUMP = "jump_to"
"""Name in the conditioning of the time [B] at which a step of a flow map ends."""


def _architecture(network: nn.Module, prediction: str) -> Architecture:
    return Architecture("flux-3-klein")


_STACKS = {
    **{f"content_mode_blocks.{mode}.*": f"mode_blocks.{mode}.*" for mode in ("image", "image_cond")},
    "txt_mode_blocks.*": "txt_mode_blocks.*",
    "single_blocks.*": "single_transformer_blocks.*",
}
_IN_BLOCKS = {
    **{f"{part}_proj": f"attn.to_{part}" for part in "qkv"},
    "attn_out": "attn.to_out.0",
    "mlp_in": "ff.linear_in",
    "mlp_out": "ff.linear_out",
    "norm.query_norm": "attn.norm_q",
    "norm.key_norm": "attn.norm_k",
}
_MODULATED = [
    f"{place}_stream_modulations.{mode}" for place in ("early", "single") for mode in ("image", "image_cond", "txt")
]
NAMES = NameTable(
    {
        **{f"emb_in.{mode}": f"x_embedders.{mode}" for mode in ("image", "image_cond")},
        "txt_in": "context_embedder",
        **{f"time_in.{side}_layer": f"timestep_embedder.linear_{n}" for n, side in ((1, "in"), (2, "out"))},
        **{f"ref_time_in.{side}_layer": f"target_timestep_embedder.linear_{n}" for n, side in ((1, "in"), (2, "out"))},
        **{f"{layer}.lin": f"{layer}.linear" for layer in _MODULATED},
        "final_layer.image.linear": "proj_out",
        "final_layer.image.adaLN_modulation.1": "norm_out.linear",
        **{f"{a}.{original}": f"{b}.{layer}" for a, b in _STACKS.items() for original, layer in _IN_BLOCKS.items()},
    },
    swapped=frozenset({"norm_out.linear"}),
    scales=frozenset(f"{stack}.norm.{norm}_norm" for stack in _STACKS for norm in ("query", "key")),
    marks={"ref_time_in.in_layer.weight": "flow_map"},
)
"""Black Forest Labs' and ComfyUI's names of the transformer."""
TRANSFORMER = Facts(
    blocks=("Flux3ModeTransformerBlock", "Flux3SingleTransformerBlock"),
    axes={
        **layers(("embed", None), "x_embedders.*", "context_embedder"),
        **layers((None, "embed"), "*_stream_modulations.*.linear", "norm_out.linear", "proj_out"),
        **layers(("time", None), "*timestep_embedder.linear_?"),
        **layers(("heads", "embed"), "*.attn.to_[qkv]"),
        **layers(("embed", "heads"), "*.attn.to_out.0"),
        **layers(((Segment("mlp"), Segment("mlp")), "embed"), "*.ff.linear_in"),
        **layers(("embed", "mlp"), "*.ff.linear_out"),
        "*.attn.norm_[qk].weight": (HEAD,),
    },
    heads="heads",
    layers={"attention": ("attn.to_[qkv]", "attn.to_out.0"), "ff": ("ff.linear_*",)},
    readers=(("attn", "to_q", "to_k", "to_v"),),
    names=NAMES,
    unknown_to_diffusers=("*",),
    architecture=_architecture,
    float32=("*.norm_[qk].weight",),
)
FACTS: dict[type, Facts] = {Flux3Transformer2DModel: TRANSFORMER}
_OF_REFERENCES = "image_cond"
"""In the names of all parameters that only reference images reach."""


class Settings(TransformerSettings, ReferenceSettings):
    """FLUX.3 klein, base or flow map."""

    family: Literal["flux3"] = "flux3"
    """Name of the family."""
    text_encoder: Component = BASE
    """The language model: Qwen3-VL 4B, of which the part that reads text is used."""
    max_sequence_length: int = Field(640, ge=16, le=8192)
    """Tokens that are read of a caption in its turn; longer ones are cut."""
    text_encoder_out_layers: list[int] = Field(_LAYERS, min_length=1)
    """Hidden states of the text encoder that are read side by side; 0 are the embeddings."""
    sample_posterior: bool = False
    """Draw a latent from the autoencoder's posterior for each sample and epoch; off, as its pipeline reads reference
    images: take the posterior's mean."""

    pipeline_class: ClassVar[str] = "Flux3ModularPipeline"
    further_classes: ClassVar[tuple[str, ...]] = ("Flux3DistilledModularPipeline",)
    schedulers: ClassVar[Schedulers] = FlowMatching(token_px=16)
    own_scheduler: ClassVar[Mapping[str, Any]] = {"_class_name": EULER, "num_train_timesteps": 1000, "shift": 6.93}
    guidance: ClassVar[Guidance] = ClassifierFree(sides_apart=True)
    reference_rule: ClassVar[References] = References(
        most=10, alone=References(most=1, max_px=4 * 1024 * 1024, pads=True)
    )
    usual: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "data": {"resolution": 1024},
        "sampling": {"guidance_scale": 3.5, "num_inference_steps": 50},
    }

    @classmethod
    def usual_of(cls, configs: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        """Sixteen steps without guidance for a flow map."""
        few = {"guidance_scale": 1.0, "num_inference_steps": 16}
        return {**cls.usual, "sampling": few} if configs.get("transformer", {}).get("flow_map") else cls.usual


_EXAMPLE = """\
from diffusers import ClassifierFreeGuidance, Flux3AutoBlocks

blocks = Flux3AutoBlocks()
blocks.sub_blocks.pop("prompt_upsampler")  # it would rewrite prompts, which were trained as they stand
pipe = blocks.init_pipeline("path/to/this/folder")
pipe.load_components()  # the processor of its text encoder needs torchvision
pipe.update_components(guider=ClassifierFreeGuidance(guidance_scale={scale}))
image = pipe(prompt="a prompt", {call}, output="images")[0]
"""


def load(settings: Settings, seed: int) -> Family:
    """The family of these settings. Raises UserError if something is missing or does not fit together."""
    components = ComponentLoader(settings, seed)
    autoencoder = vae.load(components, AutoencoderKLFlux2.__name__)
    chosen = tuple(settings.text_encoder_out_layers)
    reading = replace(_READS, max_tokens=settings.max_sequence_length, layers=chosen)
    encoder = text_encoder.load(components, "text_encoder", "tokenizer", reading)
    text_encoder.check_kind(encoder, "qwen3_vl", "Qwen3-VL 4B")
    texts = TextConditioning((encoder,))
    channels = autoencoder.channels
    decided = {"in_channels": channels, "cond_in_channels": channels, "joint_attention_dim": texts.width}
    transformer = components.network("transformer", Flux3Transformer2DModel, decided, NAMES)
    check_fits("transformer", transformer, decided)
    for block in transformer.mode_blocks[_OF_REFERENCES]:
        block.attn.set_processor(_OfReferences())
        block.ff.register_forward_pre_hook(_rows)
    jumps, read = transformer.config.flow_map, f"text_encoder_out_layers={chosen}"
    of_references = frozenset(name for name, _ in transformer.named_parameters() if _OF_REFERENCES in name)
    known = replace(TRANSFORMER, unread=of_references)
    if settings.references:
        known = replace(TRANSFORMER, of_references=of_references)
    return trained_net.family(
        components,
        partial(trained_net.by_length, partial(denoise, transformer)),
        {"transformer": transformer, "vae": autoencoder.net},
        {"transformer": known},
        autoencoder,
        texts,
        PipelineExporter(
            settings,
            {"tokenizer": ["transformers", "Qwen3VLProcessor"]},
            {},
            notices=() if [*chosen] == _LAYERS else (f"give the call of the pipeline {read}, or images differ",),
            example=_EXAMPLE,
            unknown=("guidance_scale", "guidance_rescale", "eta"),
            blocks="Flux3AutoBlocks",
        ),
        layout=texts.lengths,
        guidance=Jumping(_JUMP) if jumps else Settings.guidance,
        distilled="black-forest-labs/flux-3-image-klein-base" if jumps else "",
    )


class _OfReferences(Flux3AttnProcessor):
    """Attention within reference images, also where there is no token of any: the library's cannot shape nothing, and
    every layer is called, so that each has a gradient, of zeros then."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, image_rotary_emb: Any = None
    ) -> Tensor:
        if hidden_states.shape[1]:
            found: Tensor = super().__call__(attn, hidden_states, attention_mask, image_rotary_emb)
            return found
        (rows,) = _rows(attn, (hidden_states,))
        q, k, v = (layer(rows) for layer in (attn.to_q, attn.to_k, attn.to_v))
        heads = (norm(x.unflatten(-1, (-1, attn.head_dim)).float()) for norm, x in ((attn.norm_q, q), (attn.norm_k, k)))
        return attn.to_out[0](v + sum(heads).flatten(1).to(v))


def _rows(layer: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The input of a layer without the dim of samples where there is no token: a layer that a mesh has split along its
    rows cannot shape nothing. What it gives is the same nothing for all samples."""
    return inputs if inputs[0].shape[1] else (inputs[0].flatten(0, 1),)


def denoise(transformer: Any, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Residuals = ()) -> Tensor:
    """The velocity [B, C, H, W] of noisy latents, one token each.

    `cond` has `text` [B, T, D], all of which is attended to, latents [B, C, h, w] of reference images, and for a flow
    map the time at which a step ends, where one is made. What is for reference images is called without any, too, with
    no tokens: it changes nothing, and all devices of a mesh call the same.
    """
    (h, w), device = x_BCHW.shape[2:], x_BCHW.device
    given = [x_BCHW[:, :, :0], *vae.given(cond, x_BCHW)]
    y_BTC = transformer(
        hidden_states=x_BCHW.flatten(2).mT,
        encoder_hidden_states=cond["text"],
        timestep=c_noise_B,
        img_ids=_places(h, w, 0, device),
        txt_ids=nn.functional.pad(torch.arange(cond["text"].shape[1], device=device)[:, None], (3, 0)),
        image_cond_hidden_states=torch.cat([z.flatten(2).mT for z in given], 1),
        image_cond_ids=torch.cat([_places(z.shape[2], z.shape[3], n, device) for n, z in enumerate(given)]),
        # A step that ends where it begins: what a flow map predicts of it is the velocity, which is what is trained.
        target_timestep=cond.get(_JUMP, c_noise_B) if transformer.config.flow_map else None,
        return_dict=False,
    )[0]
    return y_BTC.mT.unflatten(2, (h, w))


def _places(rows: int, columns: int, number: int, device: torch.device) -> Tensor:
    """[rows * columns, 4]: 0, row and column at their scale, and minus the number of the image, 0 for the one that is
    made. Made on the device, so that nothing waits for a copy."""
    row, column = (torch.arange(n, device=device) * _SCALE for n in (rows, columns))
    places = torch.cartesian_prod(row, column)
    return nn.functional.pad(nn.functional.pad(places, (1, 0)), (0, 1), value=-float(number))
