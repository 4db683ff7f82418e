"""AdamW (Loshchilov and Hutter 2019), torch's fused form: one kernel for all tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field

from daguerre.settings import ELASTIC
from daguerre.training.optimizers.groups import Parameters, decay_groups
from daguerre.training.optimizers.optimizer import Part
from daguerre.training.settings import OptimizerSettings


class Settings(OptimizerSettings):
    """AdamW (Loshchilov and Hutter 2019)."""

    name: Literal["adamw"] = "adamw"
    """Name of the optimizer."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the second moment."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    one_pass: bool = Field(True, json_schema_extra=ELASTIC)
    """Clipping, update and moving average of float32 weights in one pass over memory, on a GPU by one kernel; off: one
    after the other. The numbers are the same up to rounding."""


def build(settings: Settings, trained: Parameters) -> list[Part]:
    """One part; its kernel takes a flag on the device that leaves out an update without asking the host."""
    groups = decay_groups(settings, trained)
    found = part(groups, settings.learning_rate, (settings.beta1, settings.beta2), settings.epsilon)
    return [replace(found, one_pass=settings.one_pass)]


def part(groups: list[dict[str, Any]], learning_rate: float, betas: tuple[float, float], epsilon: float) -> Part:
    """Fused AdamW over groups with their own weight decay."""
    return Part(
        torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=True), "itself", elementwise=True
    )


def state_bytes(settings: Settings, name: str, shape: tuple[int, ...]) -> int:
    """Of one parameter: two moments and the count of updates."""
    return 8 * math.prod(shape) + 4
