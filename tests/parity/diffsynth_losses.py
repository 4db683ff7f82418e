"""Losses of Anima and FLUX.3 klein, of which diffusers has no script, beside DiffSynth-Studio's networks and loss: our
side.

`tools/record_diffsynth_losses.py` computes the same with DiffSynth's own code, and writes RECORDED.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import losses
import numpy as np
import pytest
import torch
from tiny_families import anima, flux3
from torch import Tensor

from daguerre import plugins
from daguerre.objectives import flow
from daguerre.objectives.algebra import Diffusion
from daguerre.types import REFERENCES

RECORDED = Path(__file__).parent / "diffsynth_losses.json"
NUMBERS: dict[str, dict[str, Any]] = {
    "anima": {"conditioner": {"min_sequence_length": 512}},
    # DiffSynth's code has five blocks of each kind, heads of 128 features and an embedding of times of 256 written in.
    "flux3": {"num_layers": 5, "attention_head_dim": 128, "num_attention_heads": 1, "axes_dims_rope": (32,) * 4}
    | {"timestep_channels": 256},
}
READ: dict[str, dict[str, Any]] = {"anima": {"max_sequence_length": 512}, "flux3": flux3.reading()}
SHIFTS = {"anima": 3.0, "flux3": 6.93}
CASES = {"anima": ("anima", 0), "flux3": ("flux3", 0), "flux3 with a reference image": ("flux3", 1)}
"""Family, and reference images."""
PLACES = (150, 500, 900)
"""Of the thousand noise levels, which fall from 1, those of the samples."""
CAPTIONS = ("a large red circle", "a star", "A fox, in the snow.")


@dataclass(frozen=True)
class Case:
    """What a loss is computed of, and what ours is."""

    family: Any
    x0_BCHW: Tensor
    noise_BCHW: Tensor
    references: tuple[Tensor, ...]
    """Latents [B, C, H, W] of reference images."""
    losses: list[float]
    gradient: float
    """The norm of the transformer's gradients of the sum of these losses."""

    @property
    def digest(self) -> str:
        """SHA-256 of the numbers that both sides are given."""
        found = hashlib.sha256()
        for tensor in (self.x0_BCHW, self.noise_BCHW, *self.references):
            found.update(tensor.contiguous().numpy().tobytes())
        return found.hexdigest()


def levels(name: str) -> Tensor:
    """Noise levels [B] of the samples, float64."""
    uniform = 1 - torch.tensor(PLACES, dtype=torch.float64) / 1000
    return SHIFTS[name] * uniform / (1 + (SHIFTS[name] - 1) * uniform)


def ours(name: str, references: int, place: Path) -> Case:
    """Each caption alone, as DiffSynth computes it."""
    write: Any = {"anima": anima.write, "flux3": flux3.write}[name]
    module = plugins.find("families", name)
    base = write(place / "base", **NUMBERS[name])
    family = module.load(module.Settings(pretrained_model_name_or_path=str(base), **READ[name]), 1)
    draw = torch.Generator().manual_seed(0)
    x0, noise = (torch.randn(len(CAPTIONS), 16, 4, 6, generator=draw) for _ in range(2))
    shown = tuple(torch.randn(len(CAPTIONS), 16, 2, 4, generator=draw) for _ in range(references))
    objective = flow.build(flow.Settings.model_validate({"schedule": {"name": "linear_flow", "shift": SHIFTS[name]}}))
    objective = objective.with_noise_conditioning("auto", 1.0)
    found = []
    for row, caption in enumerate(CAPTIONS):
        cond = {**family.text.features(family.text.tokens([caption]))}
        cond |= {each: latents[row : row + 1] for each, latents in zip(REFERENCES, shown, strict=False)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Diffusion, "times", lambda *_, row=row: levels(name)[row : row + 1])
            draws = objective.draws(0, np.array([[row, 0, 0]], dtype=np.int64), x0.shape[1:])
        draws.noise.copy_(noise[row : row + 1])
        found.append(losses.loss_of(objective, family.net, x0[row : row + 1], cond, draws).loss_B.squeeze())
    torch.stack(found).sum().backward()
    squares = [p.grad.square().sum() for p in family.components["transformer"].parameters() if p.grad is not None]
    return Case(
        family, x0, noise, shown, [float(loss.detach()) for loss in found], float(torch.stack(squares).sum().sqrt())
    )
