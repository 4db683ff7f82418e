"""FLUX.3 klein with tiny networks."""

from pathlib import Path
from typing import Any

import numpy as np
import tiny_texts
import torch
from diffusers import (
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    Flux3AutoBlocks,
    Flux3DistilledAutoBlocks,
    Flux3Transformer2DModel,
)
from tiny_models import enlarged
from transformers import Qwen3VLForConditionalGeneration
from wrong import Writer, Wrong

from tiny_families.flux2 import autoencoder
from tiny_families.flux2 import write as write_flux2

LAYERS = (1, 3)
NUMBERS = {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4}
NUMBERS |= {"in_channels": 16, "cond_in_channels": 16, "joint_attention_dim": len(LAYERS) * tiny_texts.WIDTH}
NUMBERS |= {"axes_dims_rope": (4, 4, 4, 4), "timestep_channels": 32}


def blocks(flow_map: bool = False) -> Any:
    """The blocks of its modular pipeline, without the network that rewrites prompts."""
    found = Flux3DistilledAutoBlocks() if flow_map else Flux3AutoBlocks()
    found.sub_blocks.pop("prompt_upsampler")
    return found


def write(folder: Path, seed: int = 0, **numbers: Any) -> Path:
    """Writes a Flux3ModularPipeline with random weights; `numbers` change the transformer's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with torch.no_grad():
            transformer: Any = enlarged(Flux3Transformer2DModel(**{**NUMBERS, **numbers}), "attn|modulation", 2.0)
        for name, parameter in transformer.named_parameters():
            if "norm_q" in name or "norm_k" in name:  # of ones, a norm whose gradient is wrong would not show
                parameter.data = 1 + 0.3 * torch.randn_like(parameter)
        pipeline = blocks(transformer.config.flow_map).init_pipeline()
        pipeline.update_components(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=6.93),
            vae=autoencoder(),
            text_encoder=tiny_texts.qwen3_vl(Qwen3VLForConditionalGeneration),
            tokenizer=tiny_texts.qwen3_vl_processor(),
        )
    pipeline.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


def reading() -> dict[str, Any]:
    """Settings of the section `model` with which the tiny text encoder is read."""
    return {"text_encoder_out_layers": [*LAYERS]}


def settings(folder: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(write(folder / "flux3")), **reading()}


def opened(folder: Path) -> Any:
    """The pipeline of a folder offline. The processor of its text encoder cannot be read without torchvision."""
    flow_map = "Distilled" in (folder / "modular_model_index.json").read_text()
    pipe = blocks(flow_map).init_pipeline(str(folder))
    pipe.load_components(names=["transformer", "vae", "text_encoder", "scheduler"], local_files_only=True)
    pipe.update_components(tokenizer=tiny_texts.qwen3_vl_processor())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn(pipe: Any, prompt: str, noise_BCHW: torch.Tensor, scale: float, **call: Any) -> np.ndarray:
    """The image [H, W, 3] from 0 to 255 of a pipeline at a guidance scale, for this initial noise."""
    if "guider" in pipe.components:
        pipe.update_components(guider=ClassifierFreeGuidance(guidance_scale=scale))
    read = {"text_encoder_out_layers": LAYERS, "output_type": "np", "output": "images"}
    image = pipe(prompt=prompt, latents=noise_BCHW, **read, **call)[0]
    return (image * 255).round().astype(int)


OTHERS: dict[str, Writer] = {
    "flow_map": lambda place: write(place, flow_map=True),
    "wide": lambda place: write(place, joint_attention_dim=96),
    "flux2": write_flux2,
}
WRONG = {
    "text encoder": Wrong("model.text_encoder={sd} model.tokenizer={sd}", "text encoders can be"),
    "language model": Wrong(
        "model.text_encoder={qwen3} model.tokenizer={qwen3}", "this model was trained with Qwen3-VL 4B"
    ),
    "autoencoder": Wrong("model.vae={sd}", "latents are made by AutoencoderKLFlux2"),
    "transformer": Wrong("model.transformer={wide}", "joint_attention_dim is 96, and the other networks give 64"),
    "other transformer": Wrong("model.transformer={flux2}", "holds a Flux2Transformer2DModel, and this model has"),
    "layers": Wrong("model.text_encoder_out_layers=[4,8]", "hidden state 8, but the encoder has 4 layers"),
    "references": Wrong("model.references=11", "a whole number from 0 to 10"),
    "distilled": Wrong(
        "model.pretrained_model_name_or_path={flow_map}", "train black-forest-labs/flux-3-image-klein-base"
    ),
    "guidance": Wrong("generate guidance_scale=0.5", "1 are no guidance"),
    "negative prompt": Wrong("generate guidance_scale=1 negative_prompt=blurry", "there is no guidance"),
}
