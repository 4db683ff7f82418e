"""A ControlNet's training, recorded and replayed with diffusers' own ControlNetModel and UNet in a plain loop.

The loop is that of diffusers' train_controlnet.py and train_controlnet_sdxl.py: the picture in [0, 1], residuals added
to the frozen UNet, the plain square error. By the published formula every number is equal to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import plain_loop
import pytest
import torch
from data_sets import SIZES_PX
from data_sets import folder as images
from diffusers import ControlNetModel, UNet2DConditionModel
from PIL import Image
from plain_loop import Models
from recorded import LEARNING_RATE, train
from tiny_models import write_sd, write_sdxl
from torch import Tensor

WRITERS = {"sd": write_sd, "sdxl": write_sdxl}
EMBEDDING = (16, 32)
"""The tiny autoencoder halves each side once."""


def controls(folder: Path) -> Path:
    """Captioned images, each with a picture beside it."""
    images(folder, 12)
    for i in range(12):
        width, height = SIZES_PX[i % 5]
        pixels = np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03}.control.png")
    return folder


@pytest.mark.parametrize("family", ["sd", pytest.param("sdxl", marks=pytest.mark.long)])
def test_training_is_that_of_diffusers(family: str, tmp_path: Path) -> None:
    base = WRITERS[family](tmp_path / "model")
    torch.manual_seed(1)
    unet = UNet2DConditionModel.from_pretrained(base / "unet", low_cpu_mem_usage=False)
    start = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=EMBEDDING)
    with torch.no_grad():  # as after some training: from zeros the picture is not seen before the third update
        for p in start.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    start.save_pretrained(tmp_path / "start")
    recipe = {
        "model": {"family": family, "pretrained_model_name_or_path": str(base)},
        "objective": {"name": "eps"},
        "adapters": {"own": {"name": "controlnet", "controlnet_model_name_or_path": str(tmp_path / "start")}},
    }
    data = {"source": "folder", "path": str(controls(tmp_path / "controls")), "resolution": 16, "random_flip": True}
    data |= {"crop": "random", "caption_dropout": 0.25, "held_out_fraction": 0.0}
    ours = train(tmp_path, recipe | {"data": data})

    models = Models(base)
    models.unet.requires_grad_(False).eval()
    models.controlnet = ControlNetModel.from_pretrained(tmp_path / "start", low_cpu_mem_usage=False).train()

    def reader(batch: Any) -> dict[str, Any]:
        assert batch.images["control"][:, 3].min() == 255
        hint: Tensor = batch.images["control"][:, :3].float() / 255
        return {**getattr(models, family)(batch), "controlnet_cond": hint}

    trained, rates = {"controlnet": models.controlnet}, {"controlnet": LEARNING_RATE}
    theirs = plain_loop.train(ours.updates, models.by_formula, reader, trained, rates, fused=True)
    found = plain_loop.differences(ours, theirs, plain_loop.largest)
    assert max(found.values()) <= 1e-6, found
    before = start.state_dict()
    assert all(not torch.equal(value, before[name]) for name, value in models.controlnet.state_dict().items())
