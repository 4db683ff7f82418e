"""A training run through the command line whose batches, losses and gradients are written down, to be replayed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from data_sets import folder as images
from safetensors.torch import load_file
from torch import Tensor

from daguerre.assembly.parts import build
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.training import step
from daguerre.types import NUMBERS, TOKENS, Batch

STEPS = 6
LEARNING_RATE = 1e-4
PLAIN: dict[str, dict[str, Any]] = {
    "training": {"kernels": "plain", "channels_last": False},
    "optimizer": {"one_pass": False},
}
"""Computed by the operators that a plain loop has, in its order, so that rounding is the same."""
FAST = ("training.kernels=auto", "training.channels_last=auto", "optimizer.one_pass=true")
"""Onto the command line: what these settings are by default."""
RECIPE: dict[str, Any] = {
    "run_name": "recorded",
    "data": {
        "source": "folder",
        "resolution": 16,
        "crop": "random",
        "random_flip": True,
        "caption_dropout": 0.25,
        "held_out_fraction": 0.0,
    },
    "training": {"duration": f"{STEPS} steps", "global_batch_size": 4, "device": "cpu", "mixed_precision": "no"}
    | PLAIN["training"],
    "optimizer": {"learning_rate": LEARNING_RATE} | PLAIN["optimizer"],
    "lr_scheduler": {"name": "cosine", "warmup": "2 steps"},
    "ema": {"decay": 0.9},
    "checkpoint": {"every": "6 steps", "export": False},
    "validation": {"every": None},
    "sampling": {"num_images": 0},
    "logging": {"every": "1 step", "tensorboard": False},
}
"""A recipe without model and objective."""


@dataclass
class Recorded:
    """What happened in a run."""

    updates: list[Sequence[Batch]] = field(default_factory=list)
    """Micro-batches of each update, with what was drawn for them."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Of each update, before clipping, by the parameters' names."""
    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the last update, as the checkpoint has them."""
    ema: dict[str, Tensor] = field(default_factory=dict)


def random_inputs(batch: Batch) -> list[str]:
    """Names of a batch's draws that are random; tokens and numbers follow from the rest of it."""
    return [name for name in sorted(batch.draws) if not name.startswith((TOKENS, NUMBERS))]


def train(place: Path, recipe: Mapping[str, Any], *given: str) -> Recorded:
    """Trains this recipe over 12 captioned images of several sizes; `given` goes onto the command line."""
    data = images(place / "images", 12)
    tree = json.loads(json.dumps(RECIPE | recipe | {"output_dir": str(place / "runs")}))
    if tree["data"]["source"] == "folder":
        tree["data"].setdefault("path", str(data))
    (place / "recorded.yaml").write_text(json.dumps(tree))
    recorded = Recorded()
    with pytest.MonkeyPatch.context() as patch:
        write_down(patch, recorded)
        assert main.run(["train", str(place / "recorded.yaml"), *given]) == 0
    run = place / "runs" / "recorded"
    lines = [json.loads(line) for line in (run / "metrics" / "metrics.jsonl").read_text().splitlines()]
    recorded.losses = [line["learning/loss"] for line in lines]
    assert len(recorded.losses) == STEPS == len(recorded.gradients)
    saved = run / "checkpoints" / f"step-{STEPS:08d}"
    recorded.weights, recorded.ema = load_file(saved / "model.safetensors"), load_file(saved / "ema.safetensors")
    return recorded


def write_down(patch: pytest.MonkeyPatch, recorded: Recorded) -> None:
    """Records each update's batches and gradients as they pass."""
    update, clip = step.update, step.clip
    names: dict[int, str] = {}

    def seen_update(state: Any, micro_batches: Sequence[Batch], *rest: Any, **named: Any) -> Any:
        recorded.updates.append(micro_batches)
        names.update({id(p): name for name, p in state.net.named_parameters()})
        return update(state, micro_batches, *rest, **named)

    def seen_clip(trained: Sequence[Tensor], *rest: Any, **named: Any) -> Any:
        recorded.gradients.append({names[id(p)]: p.grad.clone() for p in trained if p.grad is not None})
        return clip(trained, *rest, **named)

    patch.setattr(step, "update", seen_update)
    patch.setattr(step, "clip", seen_clip)


def first(recorded: Recorded, place: Path) -> dict[str, Tensor]:
    """What the run starts from, by the names of its weights."""
    net = build(configs.load(str(place / "recorded.yaml")).config, torch.device("cpu")).net
    found = net.state_dict()
    return {name: found[name].clone() for name in recorded.weights}
