"""A run folder with two checkpoints of a tiny network, made by hand, and what tests of drawing look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny_models import TINY_UNET
from whole_store import WholeStore

from daguerre.assembly import base_digests, parts
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.cli import main
from daguerre.config import config as configs


def write_recipe(folder: Path, tiny_sd: Path) -> Path:
    """A recipe whose images are 64 px wide and take two steps."""
    tree = {
        "run_name": "tiny",
        "output_dir": str(folder / "runs"),
        "model": {"family": "sd", "pretrained_model_name_or_path": str(tiny_sd), "unet": TINY_UNET},
        "objective": {"name": "v", "schedule": {"zero_terminal_snr": True}},
        "data": {"source": "shapes"},
        "training": {"duration": "2 steps", "global_batch_size": 2, "device": "cpu"},
        "sampling": {"num_inference_steps": 2, "guidance_scale": 3.0, "num_images": 6},
    }
    (folder / "tiny.yaml").write_text(json.dumps(tree))
    return folder / "tiny.yaml"


def build(folder: Path, tiny_sd: Path) -> parts.Components:
    """The parts of that recipe, ready to draw."""
    made = parts.build(configs.load(str(write_recipe(folder, tiny_sd))).config)
    made.net.eval()
    return made


def weights(shift: float, built: parts.Components) -> dict[str, torch.Tensor]:
    """All weights of the net moved by a number."""
    return {name: value + shift for name, value in built.net.state_dict().items()}


def write_run(recipe: Path) -> Path:
    """A run folder with two checkpoints; model and EMA weights differ."""
    config = configs.load(str(recipe)).config
    folder = RunFolder(Path(config.output_dir) / config.run_name)
    built = parts.build(config)
    for step in (1, 2):
        tensors = {"model": weights(0.01 * step, built), "ema": weights(-0.01 * step, built)}
        base = base_digests.of(config, built.family, built.attached)
        own = {"state": {"step": step, "slots": 0, "samples": 0}, "base": base}
        WholeStore(folder.checkpoints).save(f"step-{step:08d}", tensors, own, built.family.files())
    folder.config.write_text(configs.dump(config))
    return folder.path


def drawn(folder: Path) -> np.ndarray:
    """All PNG images of a folder, [N, H, W, 3] int64, by name."""
    return np.stack([np.asarray(Image.open(path)).astype(int) for path in sorted(folder.glob("*.png"))])


def documents(folder: Path) -> list[dict[str, Any]]:
    """The JSON of each image, by name."""
    found = sorted(path for path in folder.rglob("*.json") if path.name not in ("request.json", "dataset.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in found]


def generate(*arguments: object) -> int:
    """The exit code of `daguerre generate`."""
    return main.run(["generate", *(str(argument) for argument in arguments)])
