"""Krea 2 with tiny networks."""

from pathlib import Path
from typing import Any

import tiny_texts
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel
from tiny_models import tiny_qwen_image_vae
from wrong import Writer, Wrong

LAYERS = (1, 2, 3)
NUMBERS = {"in_channels": 64, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4}
NUMBERS |= {"num_key_value_heads": 2, "intermediate_size": 64, "timestep_embed_dim": 32, "axes_dims_rope": (4, 6, 6)}
NUMBERS |= {"text_hidden_dim": tiny_texts.WIDTH, "num_text_layers": len(LAYERS), "text_intermediate_size": 48}
NUMBERS |= {"text_num_attention_heads": 2, "text_num_key_value_heads": 2}
NUMBERS |= {"num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1}
SHIFT = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
SHIFT |= {"base_image_seq_len": 256, "max_image_seq_len": 6400}


def write(folder: Path, seed: int = 0, is_distilled: bool = False, **numbers: Any) -> Path:
    """Writes a Krea2Pipeline with random weights; `numbers` change the transformer's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = Krea2Transformer2DModel(**{**NUMBERS, **numbers})
        for name, parameter in transformer.named_parameters():
            if "norm" in name or "table" in name:  # a norm's weight is its scale - 1: of zeros, errors would not show
                parameter.data = 0.3 * torch.randn_like(parameter)
        pipeline = Krea2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**SHIFT),
            vae=tiny_qwen_image_vae(),
            text_encoder=tiny_texts.qwen3_vl(),
            tokenizer=tiny_texts.qwen_tokenizer(),
            transformer=transformer,
            text_encoder_select_layers=LAYERS,
            is_distilled=is_distilled,
        )
    pipeline.save_pretrained(folder)
    return folder


def settings(folder: Path) -> dict[str, Any]:
    base = {"pretrained_model_name_or_path": str(write(folder / "krea2")), "max_sequence_length": 64}
    return {**base, "text_encoder_select_layers": [*LAYERS]}


OTHERS: dict[str, Writer] = {
    "turbo": lambda place: write(place, is_distilled=True),
    "narrow": lambda place: write(place, text_hidden_dim=16),
}
WRONG = {
    "text encoder": Wrong("model.text_encoder={sd} model.tokenizer={sd}", "text encoders can be"),
    "language model": Wrong("model.text_encoder={qwen3} model.tokenizer={qwen3}", "was trained with Qwen3-VL"),
    "autoencoder": Wrong("model.vae={sd}", "latents are made by AutoencoderKLQwenImage"),
    "transformer": Wrong("model.transformer={narrow}", "text_hidden_dim is 16, and the other networks give 32"),
    "layers": Wrong("model.text_encoder_select_layers=[1,2]", "num_text_layers is 3, and the other networks give 2"),
    "layer": Wrong("model.text_encoder_select_layers=[1,2,9]", "the encoder has 4 layers"),
    "distilled": Wrong("model.pretrained_model_name_or_path={turbo}", "distilled to few steps"),
    "distilled weights": Wrong("model.is_distilled=true", "train krea/Krea-2-Raw"),
    "guidance": Wrong("sampling.guidance_scale=-1", "guidance_scale"),
}
