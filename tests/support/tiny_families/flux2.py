"""FLUX.2 klein with tiny networks."""

from pathlib import Path
from typing import Any

import tiny_texts
import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from wrong import Writer, Wrong

LAYERS, TOKENS = (1, 2, 3), 32
NUMBERS = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 4}
NUMBERS |= {"in_channels": 16, "joint_attention_dim": 3 * tiny_texts.WIDTH, "guidance_embeds": False}
NUMBERS |= {"axes_dims_rope": (4, 4, 4, 4)}
SHIFT = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "shift": 3.0}
SHIFT |= {"base_image_seq_len": 256, "max_image_seq_len": 4096}


def autoencoder() -> AutoencoderKLFlux2:
    """With klein's factor of 16, patches included, and a norm that is none of ones."""
    vae = AutoencoderKLFlux2(
        block_out_channels=(16,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=32,
    )
    vae.bn.running_mean.copy_(torch.linspace(-0.2, 0.2, 16))
    vae.bn.running_var.copy_(torch.linspace(0.5, 2.0, 16))
    return vae


def write(folder: Path, seed: int = 0, is_distilled: bool = False, layers: int = 4, **numbers: Any) -> Path:
    """Writes a Flux2KleinPipeline with random weights, whose text encoder has `layers`; `numbers` change the
    transformer's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = Flux2Transformer2DModel(**{**NUMBERS, **numbers})
        for name, parameter in transformer.named_parameters():
            if "norm_q" in name or "norm_k" in name:  # of ones, a norm whose gradient is wrong would not show
                parameter.data = 1 + 0.3 * torch.randn_like(parameter)
        pipeline = Flux2KleinPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**SHIFT),
            vae=autoencoder(),
            text_encoder=tiny_texts.qwen3(layers=layers),
            tokenizer=tiny_texts.qwen_tokenizer(),
            transformer=transformer,
            is_distilled=is_distilled,
        )
    pipeline.save_pretrained(folder)
    return folder


def reading() -> dict[str, Any]:
    """Settings of the section `model` with which the tiny text encoder is read."""
    return {"max_sequence_length": TOKENS, "text_encoder_out_layers": [*LAYERS]}


def settings(folder: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(write(folder / "flux2")), **reading()}


OTHERS: dict[str, Writer] = {
    "distilled": lambda place: write(place, is_distilled=True),
    "dev": lambda place: write(place, guidance_embeds=True),
    "wide": lambda place: write(place, joint_attention_dim=48),
}
WRONG = {
    "text encoder": Wrong("model.text_encoder={sd} model.tokenizer={sd}", "text encoders can be"),
    "autoencoder": Wrong("model.vae={sd}", "latents are made by AutoencoderKLFlux2"),
    "transformer": Wrong("model.transformer={wide}", "joint_attention_dim is 48, and the other networks give 96"),
    "other transformer": Wrong("model.transformer={dev}", "as a number, as FLUX"),
    "layers": Wrong("model.text_encoder_out_layers=[9,18,27]", "hidden state 9, but the encoder has 4 layers"),
    "references": Wrong("model.references=11", "a whole number from 0 to 10"),
    "no reference images": Wrong("model.references=1", "no sample has a reference image, so model.references has no"),
    "distilled": Wrong(
        "model.pretrained_model_name_or_path={distilled}", "train black-forest-labs/FLUX.2-klein-base-4B"
    ),
}
