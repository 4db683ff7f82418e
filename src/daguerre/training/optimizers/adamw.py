"""AdamW (Loshchilov and Hutter 2019), torch's fused form: one kernel for all tensors."""

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field

from daguerre.settings import ELASTIC
from daguerre.training.optimizers.groups import Parameters, decay_groups
from daguerre.training.optimizers.optimizer import OptimizerPart
from daguerre.training.settings import AdamSettings


class Settings(AdamSettings):
    """AdamW (Loshchilov and Hutter 2019)."""

    name: Literal["adamw"] = "adamw"
    """Name of the optimizer."""
    one_pass: bool = Field(True, json_schema_extra=ELASTIC)
    """Clipping, update and moving average of float32 weights in one pass over memory, on a GPU by one kernel; off: one
    after the other. The numbers are the same up to rounding."""


def build(settings: Settings, trained: Parameters) -> list[OptimizerPart]:
    """One part; its kernel takes a flag on the device that leaves out an update without asking the host."""
    found = part(decay_groups(settings, trained), (settings.beta1, settings.beta2), settings.epsilon)
    return [replace(found, one_pass=settings.one_pass)]


def part(groups: list[dict[str, Any]], betas: tuple[float, float], epsilon: float) -> OptimizerPart:
    """Fused AdamW over groups with their own weight decay."""
    optimizer, made = torch.optim.AdamW(groups, betas=betas, eps=epsilon, fused=True), ("step", "exp_avg", "exp_avg_sq")
    return OptimizerPart(optimizer, "itself", made=made, elementwise=True)


def state_bytes(settings: Settings, name: str, shape: tuple[int, ...]) -> int:
    """Bytes of the state of one parameter: two moments and the count of updates."""
    return 8 * math.prod(shape) + 4
