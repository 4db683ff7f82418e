"""AdamW with moments of 8 bits (Dettmers et al. 2022, arXiv 2110.02861), by bitsandbytes."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from daguerre.errors import UserError, install
from daguerre.training.optimizers.groups import Parameters, decay_groups
from daguerre.training.optimizers.optimizer import Part
from daguerre.training.settings import OptimizerSettings

_WHOLE_BELOW, _BLOCK = 4096, 256
"""bitsandbytes: tensors of fewer numbers are not quantised; numbers that share a scale."""


class Settings(OptimizerSettings):
    """AdamW with moments of 8 bits, a quarter of the memory; tensors of under 4096 numbers keep 32 bits."""

    name: Literal["adamw_8bit"] = "adamw_8bit"
    """Name of the optimizer."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the second moment."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""


def build(settings: Settings, trained: Parameters) -> list[Part]:
    """One part. UserError on a CPU, and without bitsandbytes."""
    if any(p.device.type == "cpu" for p in trained.values()):
        raise UserError(
            "optimizer.name=adamw_8bit spares the memory of a GPU and is slow without one: "
            "use optimizer.name=adamw on a CPU, which gives the moments all their bits"
        )
    return [part(settings, trained)]


def part(settings: Settings, trained: Parameters) -> Part:
    """bitsandbytes' optimizer on any device; weights and moments are copied around each update."""
    try:
        import bitsandbytes
    except ImportError:
        raise UserError(f"optimizer.name=adamw_8bit needs bitsandbytes: {install('bitsandbytes')}") from None
    betas = (settings.beta1, settings.beta2)
    optimizer = bitsandbytes.optim.AdamW8bit(
        decay_groups(settings, trained), lr=settings.learning_rate, betas=betas, eps=settings.epsilon
    )
    return Part(optimizer, "restored", constants=("qmap1", "qmap2"))


def state_bytes(settings: Settings, name: str, shape: tuple[int, ...]) -> int:
    """Of one parameter: two moments of a byte a number, and their scales, 4 bytes each for 256 numbers; small tensors
    keep moments of float32."""
    count = math.prod(shape)
    return 8 * count if count < _WHOLE_BELOW else 2 * count + 8 * -(-count // _BLOCK)


def update_bytes(settings: Settings, name: str, shape: tuple[int, ...]) -> int:
    """Taken while an update is computed: copies of weights and moments. For `daguerre plan`, which cannot compute this
    one without memory."""
    return 4 * math.prod(shape) + state_bytes(settings, name, shape)
