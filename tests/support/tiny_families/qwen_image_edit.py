"""Qwen-Image-Edit-2511 with tiny networks, and processors of images that need no torchvision."""

from pathlib import Path
from typing import Any

import tiny_texts
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPlusPipeline
from transformers import Qwen2VLProcessor

from tiny_families.qwen_image import network, vae
from tiny_families.qwen_image_21 import SHIFT


def processor() -> Any:
    return tiny_texts.qwen3_vl_processor(Qwen2VLProcessor, 14, tiny_texts.EDIT_WORDS)


def write(folder: Path, seed: int = 0, **numbers: Any) -> Path:
    """Writes a QwenImageEditPlusPipeline with random weights; `numbers` change the transformer's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = network(**{"zero_cond_t": True, **numbers})
        pipeline = QwenImageEditPlusPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**SHIFT),
            vae=vae(),
            text_encoder=tiny_texts.qwen25_vl(tiny_texts.EDIT_WORDS),
            tokenizer=tiny_texts.qwen_tokenizer(tiny_texts.EDIT_WORDS),
            processor=processor(),
            transformer=transformer,
        )
    pipeline.save_pretrained(folder)
    return folder


def settings(folder: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(write(folder / "qwen_image_edit")), "max_sequence_length": 128}
