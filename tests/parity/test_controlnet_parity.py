"""A ControlNet's training beside diffusers' train_controlnet.py and train_controlnet_sdxl.py.

What the scripts did with the batches of our run is recorded (`tools/record_controlnet_scripts.py`). And a plain loop of
diffusers' own ControlNetModel and UNet replays a run: the picture in [0, 1], residuals added to the frozen UNet, the
plain square error. By the published formula every number is equal to the bit.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import controlnet_scripts
import numpy as np
import plain_loop
import pytest
import torch
from data_sets import SIZES_PX
from data_sets import folder as images
from diffusers import ControlNetModel
from PIL import Image
from plain_loop import Models
from recorded import LEARNING_RATE, train
from safetensors.torch import load_file
from torch import Tensor


def controls(folder: Path) -> Path:
    """Captioned images, each with a picture beside it."""
    images(folder, 12)
    for i in range(12):
        width, height = SIZES_PX[i % 5]
        pixels = np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03}.control.png")
    return folder


@pytest.mark.long  # of the quick tests, the one below replays what the script wrote
@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_training_is_that_of_diffusers(family: str, tmp_path: Path) -> None:
    base, start = controlnet_scripts.start(family, tmp_path)
    recipe = {
        "model": {"family": family, "pretrained_model_name_or_path": str(base)},
        "objective": {"name": "eps"},
        "adapters": {"own": {"name": "controlnet", "controlnet_model_name_or_path": str(start)}},
    }
    data = {"source": "folder", "path": str(controls(tmp_path / "controls")), "resolution": 16, "random_flip": True}
    data |= {"crop": "random", "caption_dropout": 0.25, "held_out_fraction": 0.0}
    ours = train(tmp_path, recipe | {"data": data})

    models = Models(base)
    models.unet.requires_grad_(False).eval()
    models.controlnet = ControlNetModel.from_pretrained(start, low_cpu_mem_usage=False).train()

    def reader(batch: Any) -> dict[str, Any]:
        assert batch.images["control"][:, 3].min() == 255
        hint: Tensor = batch.images["control"][:, :3].float() / 255
        return {**getattr(models, family)(batch), "controlnet_cond": hint}

    trained, rates = {"controlnet": models.controlnet}, {"controlnet": LEARNING_RATE}
    theirs = plain_loop.train(ours.updates, models.by_formula, reader, trained, rates, fused=True)
    found = plain_loop.differences(ours, theirs, plain_loop.largest)
    assert max(found.values()) <= 1e-6, found
    before = ControlNetModel.from_pretrained(start, low_cpu_mem_usage=False).state_dict()
    assert all(not torch.equal(value, before[name]) for name, value in models.controlnet.state_dict().items())


DIGEST = "d9b01d137e16d9a472a322dee6053cd5d3345e0d2d3c0df00644d44e7ecd7fa9"


@pytest.mark.parametrize("family", ["sd", pytest.param("sdxl", marks=pytest.mark.long)])
def test_training_is_that_of_diffusers_scripts(family: str, tmp_path: Path) -> None:
    """Our rounding: noise levels from float64, AdamW's one kernel, channels that stand last."""
    assert hashlib.sha256(controlnet_scripts.RECORDED.read_bytes()).hexdigest() == DIGEST
    theirs = json.loads(controlnet_scripts.RECORDED.read_text())[family]
    ours = controlnet_scripts.ours(family, tmp_path)
    before = load_file(tmp_path / "start" / "diffusion_pytorch_model.safetensors")
    moved = controlnet_scripts.moved(controlnet_scripts.weights(ours), before)
    controlnet_scripts.assert_as_recorded(theirs, ours, controlnet_scripts.batches_digest(ours), moved)
