"""Training of a tiny LoRA of FLUX.2 klein as diffusers' scripts do it, without and with a reference image: our side.

`tools/record_flux2_scripts.py` runs the scripts themselves on the batches of such a run, and writes RECORDED.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from recorded import LEARNING_RATE, PLAIN, Recorded, random_inputs, train
from tiny_families import flux2 as tiny
from torch import Tensor

from daguerre.assembly.parts import build
from daguerre.config import config as configs
from daguerre.objectives.algebra import Diffusion

RECORDED = Path(__file__).parent / "flux2_scripts.json"
PX, DECAY, RANK, TOKENS, PROMPT = 32, 1e-2, 4, 32, "a photo of sks dog"
SCRIPTS = {"train_dreambooth_lora_flux2_klein.py": 0, "train_dreambooth_lora_flux2_klein_img2img.py": 1}
"""By script, the reference images of a sample."""
TARGETS = [f"transformer.*attn.to_{layer}" for layer in ("q", "k", "v", "out.0", "qkv_mlp_proj", "out")]
"""The layers that the scripts extend."""


def pictures(folder: Path, references: int) -> str:
    """Images of the size that is trained on, and of pictures beside them, which the script stretches to that size."""
    folder.mkdir()
    noise = np.random.default_rng(1)
    for i in range(12):
        for name in (f"{i:03}.png", f"{i:03}.reference.png")[: 1 + references]:
            Image.fromarray(noise.integers(0, 256, (PX, PX, 3), dtype=np.uint8)).save(folder / name)
    return str(folder)


def ours(script: str, place: Path) -> Recorded:
    """The run whose batches the script is given. Noise levels are a thousand, as the script's."""
    base = tiny.write(place / "model", layers=28)
    data = {"source": "folder", "held_out_fraction": 0.0, "caption_dropout": 0.0, "resolution": PX}
    data |= {"path": pictures(place / "pictures", SCRIPTS[script]), "captions": {"text": PROMPT}}
    model = {"family": "flux2", "pretrained_model_name_or_path": str(base), "max_sequence_length": TOKENS}
    optimizer = PLAIN["optimizer"] | {"learning_rate": LEARNING_RATE, "weight_decay": DECAY, "weight_decay_exclude": []}
    training = {"duration": "6 steps", "global_batch_size": 4, "device": "cpu", "mixed_precision": "no"}
    recipe: dict[str, Any] = {
        "model": model | {"references": SCRIPTS[script]},
        "objective": {"name": "flow", "schedule": {"name": "linear_flow"}},
        "adapters": {"own": {"name": "lora", "rank": RANK, "alpha": RANK, "init": "gaussian", "targets": TARGETS}},
        "data": data,
        "optimizer": optimizer,
        "lr_scheduler": {"name": "cosine", "warmup": "2 steps"},
        "training": training | {"max_grad_norm": 1.0} | PLAIN["training"],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Diffusion, "times", thousandths)
        return train(place, recipe)


_TIMES = Diffusion.times


def thousandths(objective: Diffusion, quantile_B: Tensor) -> Tensor:
    """Times of our law, of the thousand that the scripts' scheduler has."""
    return 1 - ((1 - _TIMES(objective, quantile_B)) * 1000).floor() / 1000


def first(recorded: Recorded, place: Path) -> dict[str, Tensor]:
    """What the run starts from, by the names of its weights."""
    net = build(configs.load(str(place / "recorded.yaml")).config, torch.device("cpu")).net
    found = net.state_dict()
    return {name: found[name].clone() for name in recorded.weights}


def batches_digest(recorded: Recorded) -> str:
    """SHA-256 of all that a run's batches hold: what was recorded stands for these alone."""
    found = hashlib.sha256()
    for (batch,) in recorded.updates:
        found.update(json.dumps(batch.texts).encode())
        for value in (*batch.images.values(), *(batch.draws[name] for name in random_inputs(batch))):
            found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()
