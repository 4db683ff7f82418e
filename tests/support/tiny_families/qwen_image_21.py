"""Qwen-Image-2.1 with tiny networks."""

import json
from pathlib import Path
from typing import Any

import tiny_texts
import torch
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from tiny_models import enlarged
from transformers import Qwen3VLForConditionalGeneration
from wrong import Writer, Wrong

NUMBERS = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4, "mlp_ratio": 2}
NUMBERS |= {"context_in_dim": tiny_texts.WIDTH, "axes_dims_rope": (4, 6, 6)}
SHIFT = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9}
SHIFT |= {"base_image_seq_len": 256, "max_image_seq_len": 8192, "shift_terminal": 0.02}


def vae() -> Any:
    """The autoencoder with 64 channels and its factor of 16, which the pipeline takes for granted."""
    return AutoencoderKLQwenImage21(base_dim=8, decoder_base_dim=8, dim_mult=[1] * 5, num_res_blocks=1)


def write(folder: Path, seed: int = 0, **numbers: Any) -> Path:
    """Writes a QwenImage21Pipeline with random weights; `numbers` change the transformer's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with torch.no_grad():
            transformer: Any = enlarged(
                QwenImage21Transformer2DModel(**{**NUMBERS, **numbers}), "attn|modulation|txt_in", 3.0
            )
        for name, parameter in transformer.named_parameters():
            if "norm_q" in name or "norm_k" in name:  # of ones, a norm whose gradient is wrong would not show
                parameter.data = 1 + 0.3 * torch.randn_like(parameter)
            elif "text_norm" in name:  # which holds its scale less 1
                parameter.data = 0.3 * torch.randn_like(parameter)
        pipeline = QwenImage21Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**SHIFT),
            vae=vae(),
            text_encoder=tiny_texts.qwen3_vl(Qwen3VLForConditionalGeneration),
            processor=tiny_texts.qwen3_vl_processor(),
            transformer=transformer,
        )
    pipeline.save_pretrained(folder)
    return folder


def settings(folder: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(write(folder / "qwen_image_21")), "max_sequence_length": 64}


LEVELS = [1.0, 0.8, 0.4]


def distilled(place: Path) -> Path:
    """Writes a base that is marked as Turbo is: by its noise levels."""
    index = json.loads((write(place) / "model_index.json").read_text()) | {"sample_sigmas": LEVELS}
    (place / "model_index.json").write_text(json.dumps(index))
    FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(place / "scheduler")
    return place


OTHERS: dict[str, Writer] = {"turbo": distilled, "wide": lambda place: write(place, context_in_dim=48)}
WRONG = {
    "text encoder": Wrong("model.text_encoder={qwen25_vl}", "trained with Qwen3-VL 8B: give that one"),
    "language model": Wrong("model.text_encoder={qwen3}", "is a 'qwen3'"),
    "autoencoder": Wrong("model.vae={qwen_vae}", "latents are made by AutoencoderKLQwenImage21"),
    "tokenizer": Wrong("model.tokenizer={sd}", "tokenizer"),
    "transformer": Wrong("model.transformer={wide}", "context_in_dim is 48"),
    "layer": Wrong("model.text_encoder_layer=-2", "text_encoder_layer"),
    "distilled": Wrong("model.pretrained_model_name_or_path={turbo}", "was distilled to few steps"),
    "distilled weights": Wrong("model.is_distilled=true", "train Qwen/Qwen-Image-2.1"),
    "resolution": Wrong("data.resolution=80", "multiples of 32"),
    "guidance": Wrong("sampling.guidance_scale=0.5", "0 and 1 are no guidance"),
    "levels": Wrong("generate timestep_spacing=[1,0.5,0.6]", "give shares of noise that fall"),
    "number of levels": Wrong("generate timestep_spacing=[1,0.6,0.5]", "set num_inference_steps=3"),
}
