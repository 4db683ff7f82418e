"""Anima with tiny networks."""

import types
from pathlib import Path
from typing import Any

import tiny_texts
import torch
from diffusers import (
    AnimaAutoBlocks,
    AnimaTextConditioner,
    CosmosTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.models.transformers import transformer_cosmos
from tiny_models import tiny_qwen_image_vae
from transformers import Qwen3Model
from wrong import Writer, Wrong

NUMBERS = {"in_channels": 16, "out_channels": 16, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}
NUMBERS |= {"mlp_ratio": 2.0, "text_embed_dim": 32, "adaln_lora_dim": 8, "max_size": (4, 128, 128)}
NUMBERS |= {"rope_scale": (1.0, 4.0, 4.0), "extra_pos_embed_type": None}
CONDITIONER = {"source_dim": tiny_texts.WIDTH, "target_dim": 32, "model_dim": 32, "num_layers": 2}
CONDITIONER |= {"num_attention_heads": 2, "target_vocab_size": 98, "min_sequence_length": 48}
WINDOW = 48


def resize(mask: torch.Tensor, size: Any, interpolation: Any = None) -> torch.Tensor:
    """Stands for torchvision's, which diffusers' own forward calls on a mask of zeros."""
    return torch.nn.functional.interpolate(mask, size=size, mode="nearest")


def with_resize() -> None:
    """Lets diffusers' pipeline run without torchvision."""
    if not hasattr(transformer_cosmos, "transforms"):
        functional = types.SimpleNamespace(resize=resize)
        nearest = types.SimpleNamespace(NEAREST="nearest")
        stub: Any = types.SimpleNamespace(functional=functional, InterpolationMode=nearest)
        setattr(transformer_cosmos, "transforms", stub)  # noqa: B010  # the module has no such name yet


def write(folder: Path, seed: int = 0, conditioner: dict[str, Any] | None = None, **numbers: Any) -> Path:
    """Writes an AnimaModularPipeline with random weights; `numbers` change the transformer's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = CosmosTransformer3DModel(**{**NUMBERS, **numbers})
        network = AnimaTextConditioner(**{**CONDITIONER, **(conditioner or {})})
        for part in (transformer, network):
            for name, parameter in part.named_parameters():
                if "norm" in name and parameter.ndim == 1:  # of ones, a norm whose gradient is wrong would not show
                    parameter.data = 1 + 0.3 * torch.randn_like(parameter)
        pipeline = AnimaAutoBlocks().init_pipeline()
        pipeline.update_components(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=tiny_qwen_image_vae(),
            # a width that no vector is cut by: a row is the same in every batch, to the bit
            text_encoder=tiny_texts.qwen3(Qwen3Model, intermediate_size=64),
            tokenizer=tiny_texts.qwen_tokenizer(),
            t5_tokenizer=tiny_texts.t5_tokenizer(),
            text_conditioner=network,
        )
    pipeline.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


def settings(folder: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(write(folder / "anima")), "max_sequence_length": WINDOW}


OTHERS: dict[str, Writer] = {
    "of_wide_texts": lambda place: write(place, conditioner={"source_dim": 48}),
    "for_wide_transformers": lambda place: write(place, conditioner={"target_dim": 48}, text_embed_dim=48),
}
WRONG = {
    "text encoder": Wrong("model.text_encoder={sd} model.tokenizer={sd}", "text encoders can be"),
    "language model": Wrong("model.text_encoder={gemma}", "Anima was trained with Qwen3: give Qwen3-0.6B"),
    "autoencoder": Wrong("model.vae={sd}", "latents are made by AutoencoderKLQwenImage"),
    "conditioner": Wrong("model.text_conditioner={of_wide_texts}", "source_dim is 48, and the other networks give 32"),
    "transformer": Wrong(
        "model.text_conditioner={for_wide_transformers}", "text_embed_dim is 32, and the other networks give 48"
    ),
    "words": Wrong("model.t5_tokenizer={words_of_clip}/tokenizer", "embeds 98: give T5's tokenizer"),
    "tokenizer": Wrong("model.t5_tokenizer={qwen3}/tokenizer", "cannot be read as a tokenizer of T5"),
    "large images": Wrong("generate width=1040", "places for sides of 1024 px at most"),
    "window": Wrong("model.max_sequence_length=500", "the text conditioner was made for 48 tokens"),
    "narrow window": Wrong("model.max_sequence_length=1", "so that none is left for a text: set 2 or more"),
    "distilled": Wrong("model.is_distilled=true", "train circlestone-labs/Anima-Base-v1.0-Diffusers"),
    "long prompts": Wrong("model.long_prompts=true", "model.long_prompts"),
    "guidance": Wrong("generate guidance_scale=0.5", "1 are no guidance"),
    "negative prompt": Wrong("generate guidance_scale=1 negative_prompt=blurry", "there is no guidance"),
}
