"""Training of tiny LoRAs of models that are trained by flow matching, as diffusers' DreamBooth scripts do it: our side.

`tools/record_flow_scripts.py` runs the scripts themselves on the batches of such runs, and writes RECORDED.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_pictures
import tiny_texts
from PIL import Image
from recorded import LEARNING_RATE, PLAIN, Recorded, random_inputs, train
from tiny_families import flux, flux2, krea2, qwen_image, qwen_image_21
from tiny_models import text_encoder, tiny_tokenizer
from torch import Tensor
from transformers import CLIPTextModel

from daguerre.objectives.algebra import Diffusion

RECORDED = Path(__file__).parent / "flow_scripts.json"
DECAY, RANK, PROMPT = 1e-2, 4, "a photo of sks dog"


@dataclass(frozen=True)
class Script:
    """What sets one script apart from the others."""

    family: str
    model: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the section `model`."""
    targets: Sequence[str] | None = None
    """The layers that the script extends; None: those that a LoRA extends here, too."""
    given: tuple[str, ...] = ()
    """More of the script's command line."""
    references: int = 0
    """Reference images of a sample."""
    px: int = 32
    frames: bool = False
    """Whether its images are videos of one frame."""
    posterior: bool = True
    """Whether latents are drawn from the autoencoder's posterior, or its mean is taken."""

    @property
    def of_each(self) -> bool:
        """Whether the script reads a caption of each image: FLUX.1's script, and those with reference images, repeat
        embeddings of one prompt for all once more at every step."""
        return bool(self.references) or self.family == "flux"


_KLEIN = {"targets": [f"transformer.*attn.to_{each}" for each in ("q", "k", "v", "out.0", "qkv_mlp_proj", "out")]}
_KLEIN |= {"model": {"max_sequence_length": 32}, "posterior": False}
_COLUMNS = ("--cond_image_column=reference", "--image_column=image", "--caption_column=text")
SCRIPTS = {
    # Without these the script reads the layers 10, 20 and 30, the pipeline others.
    "train_dreambooth_lora_flux2_klein.py": Script(
        "flux2", given=("--max_sequence_length=32", "--text_encoder_out_layers", "9", "18", "27"), **_KLEIN
    ),
    "train_dreambooth_lora_flux2_klein_img2img.py": Script(
        "flux2", given=("--max_sequence_length=32", *_COLUMNS), references=1, **_KLEIN
    ),
    "train_dreambooth_lora_flux.py": Script(
        "flux",
        {"max_sequence_length": 16, "training_guidance": 3.5},
        [
            *("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0", "attn.add_?_proj", "attn.to_add_out"),
            *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
        ],
        ("--max_sequence_length=16", "--guidance_scale=3.5"),
    ),
    "train_dreambooth_lora_krea2.py": Script(
        "krea2",
        {"max_sequence_length": 64, "text_encoder_select_layers": [*krea2.LAYERS]},
        [  # without ff.gate
            *("img_in", "final_layer.linear", "to_q", "to_k", "to_v", "to_out.0", "to_gate", "ff.up", "ff.down"),
            *("text_fusion.projector", "txt_in.linear_1", "txt_in.linear_2"),
            *("time_embed.linear_1", "time_embed.linear_2", "time_mod_proj"),
        ],
        ("--max_sequence_length=64",),
        frames=True,
    ),
    "train_dreambooth_lora_qwen_image.py": Script(
        "qwen_image", {"max_sequence_length": 64}, given=("--max_sequence_length=64",), frames=True
    ),
    "train_dreambooth_lora_qwenimage21.py": Script("qwen_image_21", px=64, frames=True),
    "train_dreambooth_lora_qwenimage21_img2img.py": Script(
        "qwen_image_21", given=_COLUMNS, references=1, px=64, frames=True
    ),
}


def model(script: Script, place: Path) -> Path:
    """Writes the model: FLUX.2's with as many layers as are read, FLUX.1's with a CLIP of as many tokens."""
    if script.family == "flux2":
        return flux2.write(place, layers=28)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_texts, "clip", lambda: text_encoder(CLIPTextModel, tiny_texts.WIDTH, 3, 77, "quick_gelu"))
        patch.setattr(tiny_texts, "clip_tokenizer", lambda: tiny_tokenizer(77))
        module: Any = {"flux": flux, "krea2": krea2, "qwen_image": qwen_image, "qwen_image_21": qwen_image_21}
        return module[script.family].write(place)


def pictures(folder: Path, script: Script) -> str:
    """Images of the size that is trained on, and of pictures beside them, which the scripts stretch to that size."""
    folder.mkdir()
    noise = np.random.default_rng(1)
    for i in range(12):
        for name in (f"{i:03}.png", f"{i:03}.reference.png")[: 1 + script.references]:
            pixels = noise.integers(0, 256, (script.px, script.px, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name)
    return str(folder)


def ours(script: Script, place: Path) -> Recorded:
    """The run whose batches the script is given. Noise levels are a thousand and have no shift, as the script's."""
    data = {"source": "folder", "held_out_fraction": 0.0, "caption_dropout": 0.0, "resolution": script.px}
    data |= {"path": pictures(place / "pictures", script), "captions": {"text": PROMPT}}
    own = {"name": "lora", "rank": RANK, "alpha": RANK, "init": "gaussian"}
    optimizer = PLAIN["optimizer"] | {"learning_rate": LEARNING_RATE, "weight_decay": DECAY, "weight_decay_exclude": []}
    training = {"duration": "6 steps", "global_batch_size": 4, "device": "cpu", "mixed_precision": "no"}
    base = {"family": script.family, "pretrained_model_name_or_path": str(model(script, place / "model"))}
    recipe: dict[str, Any] = {
        "model": base | dict(script.model) | ({"references": script.references} if script.references else {}),
        "objective": {"name": "flow", "schedule": {"name": "linear_flow"}},
        "adapters": {"own": own | ({"targets": script.targets} if script.targets else {})},
        "data": data,
        "optimizer": optimizer,
        "lr_scheduler": {"name": "cosine", "warmup": "2 steps"},
        "training": training | {"max_grad_norm": 1.0} | PLAIN["training"],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Diffusion, "times", thousandths)
        if "21" in script.family:
            reference_pictures.small_rule(patch, script.family, script.px**2, script.px**2)
        return train(place, recipe)


_TIMES = Diffusion.times


def thousandths(objective: Diffusion, quantile_B: Tensor) -> Tensor:
    """Times of our law, of the thousand that the scripts' scheduler has."""
    return 1 - ((1 - _TIMES(objective, quantile_B)) * 1000).floor() / 1000


def batches_digest(recorded: Recorded) -> str:
    """SHA-256 of all that a run's batches hold: what was recorded stands for these alone."""
    found = hashlib.sha256()
    for (batch,) in recorded.updates:
        found.update(json.dumps(batch.texts).encode())
        for value in (*batch.images.values(), *(batch.draws[name] for name in random_inputs(batch))):
            found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()
