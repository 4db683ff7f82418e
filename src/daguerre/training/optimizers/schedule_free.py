"""Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682), by schedulefree: averages take the schedule's place."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from daguerre.training.optimizers.groups import Parameters, decay_groups
from daguerre.training.optimizers.optimizer import OptimizerPart, not_installed
from daguerre.training.settings import AdamSettings


class Settings(AdamSettings):
    """Schedule-free AdamW (Defazio et al. 2024): needs no falling learning rate, and evaluates at its own averages."""

    averages_weights: ClassVar[bool] = True
    made_with: ClassVar[tuple[str, ...]] = ("beta1",)  # the average follows from it, z and the weights

    name: Literal["schedule_free"] = "schedule_free"
    """Name of the optimizer."""
    learning_rate: float = Field(2.5e-4, gt=0)
    """Learning rate after the warm-up; 1 to 10 times what a schedule would want."""
    beta1: float = Field(0.9, gt=0, lt=1)
    """Share of the average in the weights at which gradients are taken."""
    r: float = Field(0.0, ge=0)
    """Update t counts in the average with t^r times a power of the learning rate."""
    weight_lr_power: float = Field(2.0, ge=0)
    """That power, of the largest learning rate so far."""


def build(settings: Settings, trained: Parameters) -> list[OptimizerPart]:
    """One part, whose weights and moments are copied around each update. UserError without schedulefree."""
    try:
        import schedulefree
    except ImportError:
        raise not_installed("schedule_free", "schedulefree") from None
    optimizer = schedulefree.AdamWScheduleFree(
        decay_groups(settings, trained),
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        r=settings.r,
        weight_lr_power=settings.weight_lr_power,
    )
    # The library has two modes, and steps in this one alone. Averages are read by formula, so that it never leaves it.
    optimizer.train()

    def averaged(p: Tensor, state: Mapping[str, Any]) -> Tensor:
        """x of the paper, from y, which is trained, and z."""
        return p.lerp(state["z"], 1.0 - 1.0 / settings.beta1) if state else p.clone()

    counters = ("k", "weight_sum", "lr_max", "scheduled_lr")
    return [OptimizerPart(optimizer, "restored", counters, averaged=averaged, elementwise=True)]


def state_bytes(settings: Settings, name: str, shape: tuple[int, ...]) -> int:
    """Bytes of the state of one parameter: z of the paper, and the second moment."""
    return 8 * math.prod(shape)
