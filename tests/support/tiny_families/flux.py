"""FLUX.1 dev with tiny networks."""

from pathlib import Path
from typing import Any

import tiny_texts
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from tiny_models import tiny_flux_vae
from wrong import Writer, Wrong

NUMBERS = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 4}
NUMBERS |= {"in_channels": 16, "joint_attention_dim": tiny_texts.WIDTH, "pooled_projection_dim": tiny_texts.WIDTH}
NUMBERS |= {"guidance_embeds": True, "axes_dims_rope": (4, 6, 6)}
SHIFT = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
SHIFT |= {"base_image_seq_len": 256, "max_image_seq_len": 4096}


def write(folder: Path, seed: int = 0, **numbers: Any) -> Path:
    """Writes a FluxPipeline with random weights; `numbers` change the transformer's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = FluxTransformer2DModel(**{**NUMBERS, **numbers})
        for name, parameter in transformer.named_parameters():
            if "norm_q" in name or "norm_k" in name:  # of ones, a norm whose gradient is wrong would not show
                parameter.data = 1 + 0.3 * torch.randn_like(parameter)
        pipeline = FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**SHIFT),
            vae=tiny_flux_vae(),
            text_encoder=tiny_texts.clip(),
            tokenizer=tiny_texts.clip_tokenizer(),
            text_encoder_2=tiny_texts.t5(),
            tokenizer_2=tiny_texts.t5_tokenizer(),
            transformer=transformer,
        )
    pipeline.save_pretrained(folder)
    return folder


def settings(folder: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(write(folder / "flux")), "max_sequence_length": 16}


OTHERS: dict[str, Writer] = {
    "schnell": lambda place: write(place, guidance_embeds=False),
    "wide": lambda place: write(place, joint_attention_dim=48),
}
WRONG = {
    "text encoder": Wrong("model.text_encoder={qwen3} model.tokenizer={qwen3}", "model.text_encoder"),
    "second text encoder": Wrong("model.text_encoder_2={sd} model.tokenizer_2={sd}", "model.text_encoder_2"),
    "autoencoder": Wrong("model.vae={qwen_vae}", "latents are made by AutoencoderKL"),
    "transformer": Wrong("model.transformer={wide}", "joint_attention_dim is 48, and the other networks give 32"),
    "distilled": Wrong("model.pretrained_model_name_or_path={schnell}", "train black-forest-labs/FLUX.1-dev"),
}
