"""Training of a tiny LoRA or of new tokens as diffusers' scripts do it: our side of it.

`tools/record_adapter_scripts.py` runs the scripts themselves on the batches of such a run, and writes RECORDED.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from recorded import LEARNING_RATE, PLAIN, Recorded, random_inputs, train
from tiny_models import write_sd, write_sdxl

RECORDED = Path(__file__).parent / "adapter_scripts.json"
WRITERS = {"sd": write_sd, "sdxl": write_sdxl}
PX, DECAY, RANK = 16, 1e-2, 4
INSTANCE, CLASS, PRIOR = "a photo of sks dog", "a photo of a dog", 0.7
TOKEN, TOKEN_RATE, VECTORS = "<toy>", 5e-3, 2


@dataclass(frozen=True)
class Case:
    """What a script trains."""

    family: str
    encoders: tuple[str, ...] = ()
    """Text encoders that have a LoRA, too."""
    batch: int = 4


CASES = {
    "train_text_to_image_lora.py": Case("sd"),
    "train_text_to_image_lora_sdxl.py": Case("sdxl", ("text_encoder", "text_encoder_2")),
    "train_dreambooth_lora.py": Case("sd", ("text_encoder",)),
    "train_dreambooth_lora_sdxl.py": Case("sdxl", batch=2),
    "textual_inversion.py": Case("sd"),
}
"""SDXL's DreamBooth has one image of each half: with two, the script gives the first image of the class the prompt of
the instance, as it repeats the pair of prompts and not each of them."""


def squares(folder: Path, number: int, captions: bool = False) -> str:
    """Images of the size that is trained on: SDXL's scripts then have the same sizes to tell the UNet."""
    folder.mkdir()
    noise = np.random.default_rng(len(folder.name))
    for i in range(number):
        Image.fromarray(noise.integers(0, 256, (PX, PX, 3), dtype=np.uint8)).save(folder / f"{i:03}.png")
        if captions:
            (folder / f"{i:03}.txt").write_text(f"picture number {i}", encoding="utf-8")
    return str(folder)


def ours(script: str, place: Path) -> Recorded:
    """The run whose batches the script is given."""
    case = CASES[script]
    common = {"source": "folder", "held_out_fraction": 0.0, "caption_dropout": 0.0}
    adapter: dict[str, Any] = {"name": "lora", "rank": RANK, "init": "gaussian"}
    adapter["ranks"] = dict.fromkeys(case.encoders, RANK)
    schedule: dict[str, Any] = {"name": "cosine", "warmup": "2 steps"}
    rate, most = LEARNING_RATE, 1.0
    if "dreambooth" in script:
        halves = {"instance": (3, INSTANCE, 2.0), "class": (5, CLASS, 2.0 * PRIOR)}
        members = {
            name: common | {"path": squares(place / name, count), "captions": {"text": text}, "loss_weight": weight}
            for name, (count, text, weight) in halves.items()
        }
        data: dict[str, Any] = {"source": "mix", "resolution": PX, "sources": members}
    elif script == "textual_inversion.py":
        adapter = {"name": "tokens", "placeholder_token": TOKEN, "initializer_token": "a", "num_vectors": VECTORS}
        schedule, rate, most = {"name": "constant", "warmup": "0 steps"}, TOKEN_RATE, None
        captions = {"text": TOKEN, "templates": "object"}
        data = common | {"resolution": PX, "path": squares(place / "own", 12), "captions": captions}
    else:
        data = common | {"resolution": PX, "path": squares(place / "pictures", 12, captions=True)}
        most = None if case.family == "sd" else 1.0  # SD's script clips the gradients of an iterator that is used up
    optimizer = PLAIN["optimizer"] | {"learning_rate": rate, "weight_decay": DECAY, "weight_decay_exclude": []}
    training = {"duration": "6 steps", "global_batch_size": case.batch, "device": "cpu", "mixed_precision": "no"}
    recipe: dict[str, Any] = {
        "model": {"family": case.family, "pretrained_model_name_or_path": str(WRITERS[case.family](place / "model"))},
        "objective": {"name": "eps"},
        "adapters": {"own": adapter},
        "data": data,
        "optimizer": optimizer,
        "lr_scheduler": schedule,
        "training": training | {"max_grad_norm": most} | PLAIN["training"],
    }
    return train(place, recipe)


def batches_digest(recorded: Recorded) -> str:
    """SHA-256 of all that a run's batches hold: what was recorded stands for these alone."""
    found = hashlib.sha256()
    for (batch,) in recorded.updates:
        found.update(json.dumps([batch.texts, batch.sizes.tolist()]).encode())
        for value in (batch.pixels_BCHW, *(batch.draws[name] for name in random_inputs(batch))):
            found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()
