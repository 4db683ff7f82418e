"""A run folder as a training leaves it, made up in a moment: for tests, and to look at the page."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from daguerre.data.sources.shapes import Combination, render
from daguerre.tracking.sinks import MetricsFile

CONFIG = """\
# Daguerre 0.1.0: the resolved recipe
run_name: quickstart
description: A text-to-image model from scratch, on a laptop, in minutes.
seed: 0
model:
  family: sd
  pretrained_model_name_or_path: quickstart
objective:
  name: v
data:
  resolution: 64
  sources:
    images:
      source: shapes
training:
  duration: 3k steps
  global_batch_size: 32
optimizer:
  learning_rate: 1.0e-3
"""
ENVIRONMENT = {
    "command": ["daguerre", "train", "quickstart"],
    "python": "3.11.2",
    "packages": {"daguerre": "0.1.0", "torch": "2.13.0"},
    "code": {"commit": "0123456789abcdef", "modified": False},
    "cpu": {"model": "Example CPU @ 2.40GHz", "cores": 4, "torch_threads": 2},
    "gpus": [],
    "parameters": {"trained": 3_712_004, "frozen": 1_204_331},
}
DATA = {
    "source": "shapes",
    "count": None,
    "skipped": {
        "not an image": {"count": 3, "examples": ["holiday/notes.txt", "holiday/a.jpg"]},
        "caption is no UTF-8": {"count": 1, "examples": ["old/latin1.jpg"]},
    },
}
EVALUATION = {
    "shapes": {
        "step": 3000,
        "count": 200,
        "rows": [
            {"name": "background", "value": 0.995, "must": 0.95, "aim": 0.98},
            {"name": "colour", "value": 0.965, "must": 0.95, "aim": 0.98},
            {"name": "shape", "value": 0.915, "must": 0.80, "aim": 0.95},
            {"name": "size", "value": 0.755, "must": 0.80, "aim": 0.90},
        ],
    }
}
WISHES = [
    Combination("large", "red", "circle", "blue"),
    Combination("small", "green", "star", "white"),
    Combination("medium", "yellow", "square", "purple"),
    Combination("large", "cyan", "triangle", "black"),
]


def write_run(folder: Path, steps: int = 3000, saves: int = 6, log_every: int = 10, state: str = "finished") -> Path:
    """A whole run of `steps` updates; nobody holds the folder."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    document(folder, "environment.json", ENVIRONMENT)
    document(folder, "data.json", DATA)
    document(folder, "evaluation.json", EVALUATION)
    write_status(folder, state, steps)
    write_metrics(folder, steps, log_every)
    for i in range(1, saves + 1):
        write_samples(folder, steps * i // saves, i / saves)
    return folder


def document(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def write_status(folder: Path, state: str, step: int, reason: str = "") -> None:
    status = {"state": state, "reason": reason, "step": step, "samples": step * 32, "total_steps": 3000}
    document(folder, "status.json", status | {"pid": 1, "host": "laptop", "updated": "2026-11-21T04:00:00+00:00"})


def write_metrics(folder: Path, steps: int, log_every: int = 10) -> None:
    dice = random.Random(0)
    file = MetricsFile(folder / "metrics" / "metrics.jsonl")
    for step in range(log_every, steps + 1, log_every):
        loss = 0.06 + math.exp(-step / 250) + 0.02 * dice.random()
        values = {
            "learning/loss": loss,
            "learning/current_learning_rate": 1e-3 * min(1, step / 200) * (1 + math.cos(math.pi * step / steps)) / 2,
            "learning/gradient_norm": 0.2 + 2 * math.exp(-step / 300) * dice.random() + 0.1 * dice.random(),
            "learning/nonfinite_steps": 2 if step > steps / 2 else 0,
            "perf/step_time_seconds": 0.1 + 0.01 * dice.random(),
            "perf/samples_per_second": 32 / (0.1 + 0.01 * dice.random()),
            "perf/data_wait_seconds": 0.001 * dice.random(),
            "memory/peak_bytes": 1.4e9,
        }
        values |= {f"learning/loss_quartile_{i}": loss * (1.8 - 0.45 * i) + 0.02 * dice.random() for i in range(4)}
        file.write(step, step * 32, values)
        if step % (log_every * 25) == 0:
            levels = {f"validation/loss_level_{i}": loss * 2 ** (1.5 - i / 2) for i in range(8)}
            file.write(step, step * 32, {"validation/loss": loss * 1.03, **levels})
    file.close()


def write_samples(folder: Path, step: int, done: float, place: Path | None = None) -> None:
    """Images that come out of noise as `done` goes from 0 to 1; those of a save, unless `place` is another folder."""
    place = place or folder / "samples" / f"step-{step:08d}"
    place.mkdir(parents=True)
    noise = np.random.default_rng(0).normal(128, 60, (64, 64, 3))
    listing = []
    for i, wish in enumerate(WISHES):
        clean = render(wish, centre_px=(0.0, 0.0), scale=1.0).astype(float)
        share = min(1.0, done**0.7)
        pixels = np.clip(share * clean + (1 - share) * noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(place / f"{i:03d}.png")
        prompt = f"a {wish.size} {wish.colour} {wish.shape} on a {wish.background} background"
        entry = {"file": f"{i:03d}.png", "prompt": prompt, "negative_prompt": "", "seed": i, "sampler": "ddim"}
        listing.append(entry | {"num_inference_steps": 30, "guidance_scale": 5.0})
    document(place, "samples.json", listing)
