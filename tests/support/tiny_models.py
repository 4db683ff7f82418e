"""Tiny networks for tests: complete pipelines of a few MB with random weights in diffusers' layout, made in a second.

`tiny_sd_folder(path)` writes the smallest one; `TINY_UNET` are the numbers of a UNet that fits it. `write_sd` writes
one with what sets Stable Diffusion 1.x or 2.x apart, `write_sdxl` one of SDXL's kind. Nothing here is trained: the
images are noise, but they depend on every input, so that parity tests mean something.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    DDIMScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from daguerre.types import Latents, Prompt

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


def tiny_tokenizer(max_tokens: int = MAX_TOKENS, pad: str = "<|endoftext|>") -> CLIPTokenizer:
    """A CLIP tokenizer of 514 tokens: each byte, each byte at a word's end, start and end of text; no merges.

    `pad`: the second tokenizers of SDXL and those of 2.x pad with "!", whose id is 0 here as it is there.
    """
    symbols = sorted(ByteLevel.alphabet())
    words = [*symbols, *(symbol + "</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], pad_token=pad)
    tokenizer.model_max_length = max_tokens
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


def tiny_flux_vae() -> AutoencoderKL:
    """FLUX.1's autoencoder, which Z-Image has, too: a shift, no 1x1 convolutions, and its factor of 8, with which a
    token of 2 x 2 latent pixels is 16 px."""
    return AutoencoderKL(
        block_out_channels=[16] * 4,
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=4,
        sample_size=32,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def tiny_qwen_image_vae() -> AutoencoderKLQwenImage:
    """Qwen-Image's autoencoder, which Krea 2 and Anima have, too: 16 channels with their statistics, and its factor of
    8."""
    numbers = {"z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
    return AutoencoderKLQwenImage(base_dim=8, **numbers)


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


SCALED_LINEAR = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
SDXL_WIDTHS = (48, 64)
"""Widths of SDXL's two text encoders."""
SDXL_POOLED = 40
"""Width of its pooled text."""
SDXL_TIME_IDS = 8
"""Features of each of its six sizes."""


def text_encoder(kind: Any, width: int, layers: int, max_tokens: int, activation: str, **config: Any) -> Any:
    """A CLIP text encoder of `kind` whose captions and layers differ visibly."""
    numbers = {
        "vocab_size": 514,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "max_position_embeddings": max_tokens,
        "hidden_act": activation,
        # The numbers that OpenAI's own configs have: none is the vocabulary's, and 2 means "pool at the highest id".
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }
    return enlarged(kind(CLIPTextConfig(**numbers | config)), ".", 4.0)


@torch.no_grad()
def enlarged(network: nn.Module, pattern: str, factor: float) -> nn.Module:
    """Multiplies the matrices whose name matches: an untrained network would hardly show what it was given."""
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1 and re.search(pattern, name):
            parameter.mul_(factor)
    return network


def write_sd(
    folder: Path,
    *,
    version: int = 1,
    prediction_type: str | None = None,
    layers: int = 2,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
    **scheduler: Any,
) -> Path:
    """Writes a Stable Diffusion 1.x- or 2.x-like pipeline into `folder` and returns it.

    2.x: another text width, activation and padding, linear projections, heads by block, v prediction. `scheduler`:
    what else goes into the config of its scheduler.
    """
    assert version in (1, 2)
    second = version == 2
    width = 64 if second else TEXT_WIDTH
    own = {"attention_head_dim": [1, 2], "use_linear_projection": True} if second else {}
    prediction_type = prediction_type or ("v_prediction" if second else "epsilon")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind: Any = DDIMScheduler if second else PNDMScheduler
        numbers = {"clip_sample": False, "set_alpha_to_one": False} if second else {"skip_prk_steps": True}
        StableDiffusionPipeline(
            vae=tiny_vae(),
            text_encoder=text_encoder(CLIPTextModel, width, layers, max_tokens, "gelu" if second else "quick_gelu"),
            tokenizer=tiny_tokenizer(max_tokens, "!" if second else "<|endoftext|>"),
            unet=enlarged(UNet2DConditionModel(**TINY_UNET | own, cross_attention_dim=width), *_LIVELY),
            scheduler=kind(**SCALED_LINEAR | numbers | {"prediction_type": prediction_type} | scheduler),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        ).save_pretrained(folder)
    return folder


def write_sdxl(
    folder: Path,
    *,
    prediction_type: str = "epsilon",
    layers: int = 3,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
    zeros_for_empty: bool = True,
    **scheduler: Any,
) -> Path:
    """Writes an SDXL-like pipeline into `folder` and returns it.

    Two text encoders of different widths and activations, the second with a projection; sizes as time ids; more than
    one transformer layer in the deeper block; `zeros_for_empty` is the pipeline's force_zeros_for_empty_prompt.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = tiny_vae()
        vae.register_to_config(scaling_factor=0.4, force_upcast=True)
        StableDiffusionXLPipeline(
            vae=vae,
            text_encoder=text_encoder(CLIPTextModel, SDXL_WIDTHS[0], layers, max_tokens, "quick_gelu"),
            text_encoder_2=text_encoder(
                CLIPTextModelWithProjection, SDXL_WIDTHS[1], layers, max_tokens, "gelu", projection_dim=SDXL_POOLED
            ),
            tokenizer=tiny_tokenizer(max_tokens),
            tokenizer_2=tiny_tokenizer(max_tokens, "!"),
            unet=enlarged(UNet2DConditionModel(**SDXL_UNET), *_LIVELY),
            scheduler=EulerDiscreteScheduler(
                **SCALED_LINEAR | {"prediction_type": prediction_type, "timestep_spacing": "leading"} | scheduler
            ),
            force_zeros_for_empty_prompt=zeros_for_empty,
            add_watermarker=False,
        ).save_pretrained(folder)
    return folder


_LIVELY = (r"attn2\.to_(v|out\.0)|conv_out|add_embedding", 2.0)
SDXL_UNET = {
    "block_out_channels": [32, 64],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 1,
    "attention_head_dim": [1, 2],
    "transformer_layers_per_block": [1, 2],
    "use_linear_projection": True,
    "norm_num_groups": 8,
    "sample_size": 8,
    "cross_attention_dim": sum(SDXL_WIDTHS),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": SDXL_TIME_IDS,
    "projection_class_embeddings_input_dim": SDXL_POOLED + 6 * SDXL_TIME_IDS,
}
"""Numbers of a UNet2DConditionModel that fits `write_sdxl`."""


def prompts(texts: Sequence[str]) -> list[Prompt]:
    """A prompt of each text alone."""
    return [Prompt(text) for text in texts]


def latents(x0_BCHW: torch.Tensor) -> Latents:
    """Clean samples as if they were sampled from empty prompts and seeds 0, 1, 2, ..."""
    return Latents(x0_BCHW, prompts([""] * len(x0_BCHW)), range(len(x0_BCHW)))
