"""Tiny networks for tests: a complete Stable Diffusion folder of 0.5 MB with random weights, made in a second.

`tiny_sd_folder(path)` writes what `diffusers` would; `TINY_UNET` are the numbers of a UNet that fits it. Nothing
here is trained: the pictures are noise, but they depend on every input, so that parity tests mean something.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

TINY_UNET = {
    "block_out_channels": [32, 64],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "layers_per_block": 1,
    "attention_head_dim": 2,
    "norm_num_groups": 8,
    "sample_size": 8,
}
"""Numbers of a UNet2DConditionModel with 0.7 M parameters."""
TEXT_WIDTH = 48
MAX_TOKENS = 24
VAE_FACTOR = 2


def tiny_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer of 514 tokens: each byte, each byte at a word's end, start and end of text; no merges."""
    symbols = sorted(ByteLevel.alphabet())
    words = [*symbols, *(symbol + "</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[])
    tokenizer.model_max_length = MAX_TOKENS
    assert len(tokenizer) == 514
    return tokenizer


def tiny_text_encoder(vocabulary: int = 514) -> CLIPTextModel:
    """A CLIP text encoder with one layer of width 48."""
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=TEXT_WIDTH,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
    )
    encoder = CLIPTextModel(config)
    with torch.no_grad():  # the usual 0.02 makes all captions look alike to an untrained UNet
        for parameter in encoder.parameters():
            parameter.mul_(8.0) if parameter.ndim > 1 else None
    return encoder


def tiny_vae() -> AutoencoderKL:
    """An autoencoder that halves each side, with 4 latent channels."""
    return AutoencoderKL(
        block_out_channels=[16, 16],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=4,
        sample_size=32,
        scaling_factor=0.6,
    )


def tiny_sd_folder(path: Path, seed: int = 0) -> Path:
    """Write a Stable Diffusion pipeline with random weights into `path` and return it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = StableDiffusionPipeline(
            vae=tiny_vae(),
            text_encoder=tiny_text_encoder(),
            tokenizer=tiny_tokenizer(),
            unet=UNet2DConditionModel(**TINY_UNET, cross_attention_dim=TEXT_WIDTH),
            scheduler=DDIMScheduler(
                beta_schedule="scaled_linear",
                beta_start=0.00085,
                beta_end=0.012,
                clip_sample=False,
                steps_offset=1,
            ),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipeline.save_pretrained(path)
    return path
