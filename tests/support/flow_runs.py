"""Short runs of families that are trained by flow matching, and the images that are generated of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from daguerre.cli import main

SIDE_PX, STEPS, SEED = 64, 3, 5


def trained(
    place: Path,
    model: dict[str, Any],
    schedule: dict[str, Any],
    *given: str,
    data: dict[str, Any] | None = None,
    batch: int = 2,
) -> Path:
    """The folder of a run of two updates, exported."""
    recipe = {
        "run_name": "drawn",
        "output_dir": str(place),
        "model": model,
        "objective": {"name": "flow", "schedule": {"name": "linear_flow", **schedule}},
        "data": data or {"source": "shapes", "checked_prompts": 2},
        "training": {"duration": "2 steps", "global_batch_size": batch, "device": "cpu", "mixed_precision": "no"},
        "optimizer": {"learning_rate": 1e-2},
        "validation": {"every": None},
        "sampling": {"num_images": 0, "num_inference_steps": STEPS, "sampler": "euler"},
        "logging": {"tensorboard": False},
    }
    (place / "drawn.yaml").write_text(json.dumps(recipe))
    assert main.run(["train", str(place / "drawn.yaml"), *given]) == 0
    return place / "drawn"


def drawn(run: Path, out: Path, scale: float) -> np.ndarray:
    """The image [H, W, 3] of `daguerre generate` at a guidance scale."""
    more = [f"height={SIDE_PX}", f"width={SIDE_PX}", f"guidance_scale={scale}", f"num_inference_steps={STEPS}"]
    assert main.run(["generate", str(run), "prompt=a red circle", f"seed={SEED}", f"out={out}", *more]) == 0
    return np.asarray(Image.open(out / "000.png")).astype(int)


def drawn_on(base: Path, run: Path, out: Path, *given: str) -> np.ndarray:
    """The image [H, W, 3] of `daguerre generate BASE use={RUN: 1}`, with the base's own schedule and guidance."""
    size = [f"height={SIDE_PX}", f"width={SIDE_PX}", f"num_inference_steps={STEPS}", f"seed={SEED}"]
    command = ["generate", str(base), f"use={{{run}: 1}}", "prompt=a red circle", f"out={out}", *size, *given]
    assert main.run(command) == 0
    return np.asarray(Image.open(out / "000.png")).astype(int)
