"""Qwen-Image with tiny networks."""

from pathlib import Path
from typing import Any

import tiny_texts
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tiny_models import enlarged
from wrong import Writer, Wrong

from tiny_families.qwen_image_21 import SHIFT

NUMBERS = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4, "in_channels": 64, "out_channels": 16}
NUMBERS |= {"joint_attention_dim": tiny_texts.WIDTH, "axes_dims_rope": (4, 6, 6)}


def vae() -> Any:
    """The autoencoder with its 16 channels and its factor of 8."""
    return AutoencoderKLQwenImage(base_dim=8, dim_mult=[1] * 4, num_res_blocks=1)


def network(**numbers: Any) -> Any:
    """The transformer with random weights, which show each of its parts; `numbers` are others than `NUMBERS`."""
    with torch.no_grad():
        transformer: Any = enlarged(QwenImageTransformer2DModel(**{**NUMBERS, **numbers}), "attn|_mod", 3.0)
    for name, parameter in transformer.named_parameters():
        if "norm" in name and parameter.ndim == 1:  # of ones, a norm whose gradient is wrong would not show
            parameter.data = 1 + 0.3 * torch.randn_like(parameter)
    return transformer


def write(folder: Path, seed: int = 0, **numbers: Any) -> Path:
    """Writes a QwenImagePipeline with random weights; `numbers` change the transformer's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = network(**numbers)
        pipeline = QwenImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**SHIFT),
            vae=vae(),
            text_encoder=tiny_texts.qwen25_vl(),
            tokenizer=tiny_texts.qwen_tokenizer(),
            transformer=transformer,
        )
    pipeline.save_pretrained(folder)
    return folder


def settings(folder: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(write(folder / "qwen_image")), "max_sequence_length": 64}


OTHERS: dict[str, Writer] = {
    "edit": lambda place: write(place, zero_cond_t=True),
    "wide": lambda place: write(place, joint_attention_dim=48),
}
WRONG = {
    "text encoder": Wrong("model.text_encoder={sd} model.tokenizer={sd}", "text encoders can be"),
    "language model": Wrong("model.text_encoder={qwen3_vl}", "trained with Qwen2.5-VL 7B: give that one"),
    "autoencoder": Wrong("model.vae={sd}", "latents are made by AutoencoderKLQwenImage:"),
    "tokenizer": Wrong("model.tokenizer={words_of_t5}", "is one of T5, whose numbers mean other words"),
    "transformer": Wrong("model.transformer={wide}", "joint_attention_dim is 48, and the other networks give 32"),
    "other transformer": Wrong("model.transformer={edit}", "trained with reference images alone"),
    "resolution": Wrong("data.resolution=72", "multiples of 16"),
    "negative prompt": Wrong("sampling.guidance_scale=1 sampling.negative_prompt=blurry", "there is no guidance"),
}
