"""Lion (Chen et al. 2023, arXiv 2302.06675): steps of one size, by the sign of an interpolated momentum."""

import math
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from daguerre.training.optimizers.groups import ByGroup, Parameters, decay_groups
from daguerre.training.optimizers.optimizer import OptimizerPart
from daguerre.training.settings import OptimizerSettings


class Settings(OptimizerSettings):
    """Lion (Chen et al. 2023). It wants a learning rate 3 to 10 times smaller than AdamW's, and as much more decay."""

    name: Literal["lion"] = "lion"
    """Name of the optimizer."""
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate, which is also the size of every step."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Share of the momentum in the step's direction."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """Decay of the momentum."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay, applied to matrices and convolution kernels, not to biases and norms."""


def build(settings: Settings, trained: Parameters) -> list[OptimizerPart]:
    """One part; an update is left out by steps of zero, on the device."""
    optimizer = Lion(decay_groups(settings, trained), (settings.beta1, settings.beta2))
    return [OptimizerPart(optimizer, "itself", made=("momentum",), elementwise=True)]


def state_bytes(settings: Settings, name: str, shape: tuple[int, ...]) -> int:
    """Bytes of the state of one parameter: the momentum."""
    return 4 * math.prod(shape)


class Lion(ByGroup):
    """Algorithm 2 of the paper over all tensors at once; `found_inf` (on the device) leaves weights and momentum."""

    found_inf: Tensor

    def __init__(self, params: list[dict[str, Any]], betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": 0.0, "betas": betas, "weight_decay": 0.0})

    def _move(self, moved: list[nn.Parameter], group: dict[str, Any]) -> None:
        for p in moved:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        beta1, beta2 = group["betas"]
        momenta = [self.state[p]["momentum"] for p in moved]
        given = [p.grad for p in moved if p.grad is not None]
        # Where the update is left out, the momentum stands for the gradient: interpolation then changes nothing.
        skip = self.found_inf > 0
        gradients = [torch.where(skip, m, g) for m, g in zip(momenta, given, strict=True)]
        steps = torch._foreach_lerp(momenta, gradients, 1.0 - beta1)
        torch._foreach_sign_(steps)
        torch._foreach_add_(steps, list(moved), alpha=group["weight_decay"])
        torch._foreach_mul_(steps, torch.logical_not(skip).to(steps[0].dtype) * group["lr"])
        torch._foreach_sub_(list(moved), steps)
        torch._foreach_lerp_(momenta, gradients, 1.0 - beta2)
