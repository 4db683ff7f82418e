"""CLIP and DINOv2 of a few kB with random weights, in folders as transformers writes them."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_models import enlarged, tiny_tokenizer
from transformers import CLIPConfig, CLIPModel, Dinov2Config, Dinov2Model

_TEXT = {
    "vocab_size": 514, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 24, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513,
}  # fmt: skip
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
           "image_size": 32, "patch_size": 8}  # fmt: skip


def clip(folder: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = CLIPConfig(text_config=_TEXT, vision_config=_VISION, projection_dim=16)
        enlarged(CLIPModel(config), ".", 4.0).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def dinov2(folder: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Dinov2Config(hidden_size=24, num_hidden_layers=1, num_attention_heads=2, patch_size=56, image_size=224)
        enlarged(Dinov2Model(config), ".", 4.0).save_pretrained(folder)
    return folder
