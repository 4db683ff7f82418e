"""A small diffusion transformer with tiny networks, as a run exports it."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel
from tiny_models import MAX_TOKENS, TEXT_WIDTH, text_encoder, tiny_tokenizer, tiny_vae
from transformers import CLIPTextModel
from wrong import Writer, Wrong

PATCH, LATENT = 2, 4
NUMBERS = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 4}
NUMBERS |= {"axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 32, "guidance_embeds": False}
NUMBERS |= {"patch_size": PATCH, "in_channels": LATENT * PATCH**2, "out_channels": LATENT}
NUMBERS |= {"joint_attention_dim": TEXT_WIDTH}


def write(folder: Path, **numbers: Any) -> Path:
    """Writes the networks with random weights and an index; `numbers` change the transformer's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = Flux2Transformer2DModel(**{**NUMBERS, **numbers})
        for name, parameter in transformer.named_parameters():
            if "norm_q" in name or "norm_k" in name:  # of ones, a norm whose gradient is wrong would not show
                parameter.data = 1 + 0.3 * torch.randn_like(parameter)
        parts: dict[str, Any] = {"transformer": transformer, "vae": tiny_vae(), "tokenizer": tiny_tokenizer()}
        parts["text_encoder"] = text_encoder(CLIPTextModel, TEXT_WIDTH, 2, MAX_TOKENS, "quick_gelu")
        parts["scheduler"] = FlowMatchEulerDiscreteScheduler(shift=2.0)
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    index = {"_class_name": "DaguerreDiTPipeline", "patch_size": PATCH, "max_sequence_length": None}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def settings(folder: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(write(folder / "dit"))}


OTHERS: dict[str, Writer] = {
    "wide": lambda place: write(place, joint_attention_dim=32),
    "small_patches": lambda place: write(place, patch_size=1, in_channels=LATENT),
}
WRONG = {
    "text encoder": Wrong("model.text_encoder={qwen3} model.tokenizer={qwen3}", "text encoders can be CLIP or T5"),
    "autoencoder": Wrong("model.vae={qwen_vae}", "AutoencoderKL"),
    "transformer": Wrong("model.transformer={wide}", "joint_attention_dim is 32, and the other networks give 48"),
    "patches": Wrong("model.transformer={small_patches}", "patch_size is 1, and the other networks give 2"),
    "references": Wrong("model.references=11", "a whole number from 0 to 10"),
}
