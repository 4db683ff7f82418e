"""Qwen-Image-Edit-2511 with tiny networks, and processors of images that need no torchvision."""

from pathlib import Path
from typing import Any

import tiny_texts
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPlusPipeline
from transformers import Qwen2VLProcessor
from wrong import Writer, Wrong

from tiny_families.qwen_image import network, vae
from tiny_families.qwen_image import write as write_qwen_image
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


OTHERS: dict[str, Writer] = {"wide": lambda place: write(place, joint_attention_dim=48), "plain": write_qwen_image}
WRONG = {
    "text encoder": Wrong("model.text_encoder={sd} model.tokenizer={sd}", "text encoders can be"),
    "language model": Wrong("model.text_encoder={qwen3_vl}", "trained with Qwen2.5-VL 7B: give that one"),
    "autoencoder": Wrong("model.vae={sd}", "latents are made by AutoencoderKLQwenImage:"),
    "transformer": Wrong("model.transformer={wide}", "joint_attention_dim is 48, and the other networks give 32"),
    "references": Wrong("model.references=0", "model.references"),
    "other model": Wrong("model.pretrained_model_name_or_path={plain}", ", a QwenImagePipeline, lacks processor/"),
    "no reference images": Wrong("data.path={images}", "no sample has a reference image"),
    "no reference image": Wrong("generate", "reference"),
    "window": Wrong("model.max_sequence_length=8", "raise it"),
    "folder of references": Wrong("data.reference_dir=nowhere", "nowhere"),
    "images' float16": Wrong("generate reference={images}/000.jpg mixed_precision=fp16", "float16"),
    "images' sides": Wrong("generate reference={images}/000.jpg height=62", "multiples of"),
    "images' LoRA": Wrong("generate reference={images}/000.jpg use={{{lora_of_sd}: 1}}", "another model"),
}
