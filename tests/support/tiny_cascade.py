"""Tiny networks of Stable Cascade: pipelines in diffusers' folders, with Stability's recorded files beside them.

Nothing is trained. The last layers are not zero, so that images depend on what they are told.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    DDPMWuerstchenScheduler,
    StableCascadeDecoderPipeline,
    StableCascadePriorPipeline,
    StableCascadeUNet,
)
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from tiny_models import text_encoder, tiny_tokenizer
from transformers import (
    CLIPImageProcessor,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

RECORDED = Path(__file__).parents[1] / "families" / "cascade"
EFFNET, PREVIEWER = RECORDED / "effnet.safetensors", RECORDED / "previewer_bright.safetensors"
"""The recorded previewer draws every latent black; this one, of write_previewer.py, shows them."""
TEXT, POOLED, IMAGE, MAX_TOKENS = 24, 20, 12, 24
TINY_C: dict[str, Any] = {
    "conditioning_dim": 16,
    "block_out_channels": [16, 16],
    "num_attention_heads": [1, 1],
    "down_num_layers_per_block": [1, 1],
    "up_num_layers_per_block": [1, 1],
    "clip_text_in_channels": TEXT,
    "clip_text_pooled_in_channels": POOLED,
    "clip_image_in_channels": IMAGE,
    "switch_level": [False],
}
TINY_B: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 2,
    "conditioning_dim": 16,
    "block_out_channels": [8, 16],
    "num_attention_heads": [-1, 1],
    "down_num_layers_per_block": [1, 1],
    "up_num_layers_per_block": [1, 1],
    "down_blocks_repeat_mappers": [1, 1],
    "up_blocks_repeat_mappers": [2, 1],
    "block_types_per_layer": [
        ["SDCascadeResBlock", "SDCascadeTimestepBlock"],
        ["SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"],
    ],
    "clip_text_pooled_in_channels": POOLED,
    "effnet_in_channels": 16,
    "pixel_mapper_in_channels": 3,
    "dropout": [0.0, 0.1],
    "timestep_conditioning_type": ["sca"],
}
"""Numbers of a StableCascadeUNet of each stage."""
VQGAN: dict[str, Any] = {"embed_dim": 16, "bottleneck_blocks": 1, "num_vq_embeddings": 8, "scale_factor": 0.43}
"""Numbers of a Stage A."""


def _texts() -> dict[str, Any]:
    encoder = text_encoder(
        CLIPTextModelWithProjection, TEXT, 2, MAX_TOKENS, "gelu", projection_dim=POOLED, eos_token_id=513
    )
    return {"text_encoder": encoder, "tokenizer": tiny_tokenizer(MAX_TOKENS)}


def write_prior(folder: Path, seed: int = 0, **numbers: Any) -> Path:
    """A pipeline of Stage C with these numbers over TINY_C, and a CLIP image encoder of 32 px."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        vision = CLIPVisionConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, image_size=32,
            patch_size=16, projection_dim=IMAGE,
        )  # fmt: skip
        StableCascadePriorPipeline(
            **_texts(),
            image_encoder=CLIPVisionModelWithProjection(vision),
            prior=StableCascadeUNet(**TINY_C | numbers),
            scheduler=DDPMWuerstchenScheduler(),
            feature_extractor=CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        ).save_pretrained(folder)
    return folder


def write_decoder(folder: Path, seed: int = 0, **numbers: Any) -> Path:
    """A pipeline of Stage B, with these numbers over TINY_B, and Stage A; its text encoder is that of `write_prior` of
    the same seed."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        StableCascadeDecoderPipeline(
            **_texts(),
            decoder=StableCascadeUNet(**TINY_B | numbers),
            vqgan=PaellaVQModel(**VQGAN),
            scheduler=DDPMWuerstchenScheduler(),
        ).save_pretrained(folder)
    return folder


def stage_c(folder: Path, decoder: Path | None = None) -> dict[str, Any]:
    """`model` of a recipe of Stage C from `write_prior`'s folder; with `decoder`, `write_decoder`'s, images are decoded
    by it."""
    model = {"family": "cascade_c", "pretrained_model_name_or_path": str(folder), "effnet": str(EFFNET)}
    if decoder is None:
        return model | {"previewer": str(PREVIEWER)}
    stages = {"name": "stages", "num_inference_steps": 2}
    return model | {"decode": stages, "decoder": str(decoder), "vqgan": str(decoder)}


def stage_b(folder: Path) -> dict[str, Any]:
    """`model` of a recipe of Stage B."""
    return {"family": "cascade_b", "pretrained_model_name_or_path": str(folder), "effnet": str(EFFNET)}
