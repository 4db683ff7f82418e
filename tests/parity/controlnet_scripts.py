"""Training of a tiny ControlNet as diffusers' train_controlnet.py and train_controlnet_sdxl.py do it: our side of it.

`tools/record_controlnet_scripts.py` runs the scripts themselves on the batches of such a run, and writes RECORDED.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from PIL import Image
from recorded import LEARNING_RATE, PLAIN, Recorded, random_inputs, train
from tiny_models import write_sd, write_sdxl
from torch import Tensor

RECORDED = Path(__file__).parent / "controlnet_scripts.json"
SCRIPTS = {"sd": "train_controlnet.py", "sdxl": "train_controlnet_sdxl.py"}
WRITERS = {"sd": write_sd, "sdxl": write_sdxl}
EMBEDDING = (16, 32)
"""The tiny autoencoder halves each side once."""
PX, DECAY = 16, 1e-2


def start(family: str, place: Path) -> tuple[Path, Path]:
    """Folders of a base model and of the ControlNet that training starts from.

    The ControlNet is as after some training: from zeros the picture is not seen before the third update.
    """
    base = WRITERS[family](place / "model")
    unet = UNet2DConditionModel.from_pretrained(base / "unet", low_cpu_mem_usage=False)
    torch.manual_seed(1)
    network = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=EMBEDDING)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    network.save_pretrained(place / "start")
    return base, place / "start"


def ours(family: str, place: Path, *given: str) -> Recorded:
    """A run over images of the size that is trained on: SDXL's script knows no other original size, and it has no
    zeros for empty captions."""
    base, controlnet = start(family, place)
    folder = place / "pairs"
    folder.mkdir()
    noise = np.random.default_rng(0)
    for i in range(12):
        for name in (f"{i:03}.png", f"{i:03}.control.png"):
            Image.fromarray(noise.integers(0, 256, (PX, PX, 3), dtype=np.uint8)).save(folder / name)
        (folder / f"{i:03}.txt").write_text(f"picture number {i}", encoding="utf-8")
    data = {"source": "folder", "path": str(folder), "resolution": PX, "random_flip": True, "held_out_fraction": 0.0}
    data["caption_dropout"] = 0.25 if family == "sd" else 0.0
    optimizer = PLAIN["optimizer"] | {"learning_rate": LEARNING_RATE, "weight_decay": DECAY, "weight_decay_exclude": []}
    recipe: dict[str, Any] = {
        "model": {"family": family, "pretrained_model_name_or_path": str(base)},
        "objective": {"name": "eps"},
        "adapters": {"own": {"name": "controlnet", "controlnet_model_name_or_path": str(controlnet)}},
        "data": data,
        "optimizer": optimizer,
    }
    return train(place, recipe, *given)


def weights(recorded: Recorded) -> dict[str, Tensor]:
    """By diffusers' names."""
    return {name.partition(".")[2]: value for name, value in recorded.weights.items()}


def batches_digest(recorded: Recorded) -> str:
    """SHA-256 of all that a run's batches hold: what was recorded stands for these alone."""
    found = hashlib.sha256()
    for (batch,) in recorded.updates:
        found.update(json.dumps(list(batch.texts)).encode())
        for value in (batch.pixels_BCHW, batch.images["control"], *(batch.draws[n] for n in random_inputs(batch))):
            found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()


def moved(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Of each tensor's change its norm, and its product with sin(0), sin(1), ...: two numbers for thousands."""
    found = {}
    for name in sorted(after):
        change = (after[name].double() - before[name].double()).flatten()
        waves = torch.arange(len(change), dtype=torch.float64).sin()
        found[name] = [float(change.norm()), float(change @ waves)]
    return found


def largest_gap(found: Mapping[str, list[float]], theirs: Mapping[str, list[float]]) -> float:
    """How far such changes are apart, as a share of the norm of theirs."""
    assert found.keys() == theirs.keys()
    return max(abs(a - b) / other[0] for n, other in theirs.items() for a, b in zip(found[n], other, strict=True))


def assert_as_recorded(theirs: Mapping[str, Any], ours: Recorded, batches: str, found: dict[str, list[float]]) -> None:
    """Losses, and the change of each tensor by its norm and a product, are those of a script with the same batches.
    With our rounding the script's weights were equal to the bit."""
    assert theirs["apart with our rounding"]["weights"] == 0.0
    assert batches == theirs["batches"], "record anew: batches are others"
    assert ours.losses == pytest.approx(theirs["losses"], rel=1e-6)
    assert largest_gap(found, theirs["moved"]) < 1e-3
    assert min(norm for norm, _ in found.values()) > 0
