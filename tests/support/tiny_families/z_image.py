"""Z-Image with tiny networks."""

from pathlib import Path
from typing import Any

import tiny_texts
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from tiny_models import tiny_flux_vae
from transformers import Qwen3Model
from wrong import Writer, Wrong

NUMBERS = {"in_channels": 4, "dim": 64, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4}
NUMBERS |= {"cap_feat_dim": tiny_texts.WIDTH, "axes_dims": [4, 6, 6], "axes_lens": [1024, 64, 64]}


def write(folder: Path, seed: int = 0, **numbers: Any) -> Path:
    """Writes a ZImagePipeline with random weights; `numbers` change the transformer's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = ZImageTransformer2DModel(**{**NUMBERS, **numbers})
        for name, parameter in transformer.named_parameters():
            if "norm" in name or "pad_token" in name:
                parameter.data = 1 + 0.3 * torch.randn_like(parameter)
        pipeline = ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
            vae=tiny_flux_vae(),
            text_encoder=tiny_texts.qwen3(Qwen3Model),
            tokenizer=tiny_texts.qwen_tokenizer(),
            transformer=transformer,
        )
    pipeline.save_pretrained(folder)
    return folder


def settings(folder: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(write(folder / "z_image")), "max_sequence_length": 64}


def distilled(place: Path) -> Path:
    """Writes a base that is marked as Turbo is: by its scheduler."""
    write(place, seed=1)
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(place / "scheduler")
    return place


OTHERS: dict[str, Writer] = {"turbo": distilled, "wide": lambda place: write(place, cap_feat_dim=48)}
WRONG = {
    "text encoder": Wrong("model.text_encoder={sd} model.tokenizer={sd}", "text encoders can be"),
    "autoencoder": Wrong("model.vae={qwen_vae}", "latents are made by AutoencoderKL"),
    "transformer": Wrong("model.transformer={wide}", "cap_feat_dim is 48, and the other networks give 32"),
    "large images": Wrong("generate height=1040", "places for sides of 1024 px at most"),
    "places": Wrong("model.max_sequence_length=993", "has places for 992 tokens"),
    "distilled": Wrong(
        "model.pretrained_model_name_or_path={turbo}", "train Tongyi-MAI/Z-Image, and generate with this one"
    ),
    "distilled weights": Wrong("model.is_distilled=true", "train Tongyi-MAI/Z-Image"),
}
