"""StableAdamW (Wortsman et al. 2023, arXiv 2304.13013): AdamW that makes the step of a tensor smaller where gradients
are larger than its second moment knows."""

import math
from typing import Any, Literal

import torch
from pydantic import Field

from daguerre.training.optimizers.groups import ByGroup, Parameters, decay_groups
from daguerre.training.optimizers.optimizer import OptimizerPart
from daguerre.training.settings import AdamSettings


class Settings(AdamSettings):
    """StableAdamW (Wortsman et al. 2023): AdamW with Adafactor's clipping of updates, against spikes of the loss."""

    name: Literal["stable_adamw"] = "stable_adamw"
    """Name of the optimizer."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """Decay of the second moment."""


def build(settings: Settings, trained: Parameters) -> list[OptimizerPart]:
    """One part, whose weights and moments are copied around each update."""
    optimizer = StableAdamW(decay_groups(settings, trained), settings)
    return [OptimizerPart(optimizer, "restored", counters=("step",))]


def state_bytes(settings: Settings, name: str, shape: tuple[int, ...]) -> int:
    """Bytes of the state of one parameter: two moments."""
    return 8 * math.prod(shape)


class StableAdamW(ByGroup):
    """Algorithm 2 of the paper, over all tensors of a group at once."""

    def __init__(self, params: list[dict[str, Any]], settings: Settings) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0, "step": 0})
        self._own = settings

    def _move(self, moved: list[Any], group: dict[str, Any]) -> None:
        own, number = self._own, group["step"]
        for p in moved:
            if not self.state[p]:
                self.state[p] |= {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        # The bias correction of Adam lies in the decays themselves.
        beta1, beta2 = (beta * (1 - beta ** (number - 1)) / (1 - beta**number) for beta in (own.beta1, own.beta2))
        gradients = [p.grad for p in moved]
        first, second = ([self.state[p][name] for p in moved] for name in ("exp_avg", "exp_avg_sq"))
        squares = torch._foreach_mul(gradients, gradients)
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_lerp_(second, squares, 1 - beta2)
        torch._foreach_div_(squares, torch._foreach_clamp_min(second, own.epsilon**2))
        rates = [group["lr"] / square.mean().sqrt().clamp(min=1.0) for square in squares]
        roots = torch._foreach_sqrt(second)
        torch._foreach_add_(roots, own.epsilon)
        steps = torch._foreach_div(first, roots)
        torch._foreach_add_(steps, moved, alpha=group["weight_decay"])
        torch._foreach_mul_(steps, rates)
        torch._foreach_sub_(moved, steps)
