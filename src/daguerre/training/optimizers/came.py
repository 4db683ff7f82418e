"""CAME (Luo et al. 2023, arXiv 2307.02047): Adafactor's memory, with steps made smaller where updates disagree."""

import math
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from daguerre.training.optimizers.groups import ByGroup, Parameters, decay_groups
from daguerre.training.optimizers.optimizer import OptimizerPart
from daguerre.training.settings import AdamSettings


class Settings(AdamSettings):
    """CAME (Luo et al. 2023): of a matrix the second moment, and how far updates lie from their mean, are kept as means
    of rows and columns. Its authors train with a rate somewhat above AdamW's."""

    name: Literal["came"] = "came"
    """Name of the optimizer."""
    learning_rate: float = Field(2e-4, gt=0)
    """Peak learning rate."""
    beta3: float = Field(0.9999, ge=0, lt=1)
    """Decay of the squared distance of updates from their mean."""
    epsilon: float = Field(1e-30, gt=0)
    """Added to the squared gradient."""
    residual_epsilon: float = Field(1e-16, gt=0)
    """Added to that squared distance."""
    clip_threshold: float = Field(1.0, gt=0)
    """Root mean square above which a tensor's update is scaled down."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, applied to matrices and convolution kernels, not to biases and norms."""


def build(settings: Settings, trained: Parameters) -> list[OptimizerPart]:
    """One part, whose weights and moments are copied around each update."""
    return [OptimizerPart(CAME(decay_groups(settings, trained), settings), "restored")]


def state_bytes(settings: Settings, name: str, shape: tuple[int, ...]) -> int:
    """Bytes of one parameter's state: the first moment, and the second (of the last two dims means of rows and columns,
    as of the distances)."""
    count = math.prod(shape)
    if len(shape) < 2:
        return 8 * count
    return 4 * (count + 2 * (math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]))


class CAME(ByGroup):
    """Algorithm 2 of the paper, as its authors' code has it: one-dim tensors keep a whole second moment."""

    def __init__(self, params: list[dict[str, Any]], settings: Settings) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0})
        self._own = settings

    def _move(self, moved: list[nn.Parameter], group: dict[str, Any]) -> None:
        for p in moved:
            assert p.grad is not None
            self._move_one(p, p.grad, self.state[p], group)

    def _move_one(self, p: nn.Parameter, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        own, factored = self._own, p.ndim >= 2
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
            if factored:
                for name in ("sq", "res"):
                    state |= {f"{name}_row": p.new_zeros(p.shape[:-1])}
                    state |= {f"{name}_col": p.new_zeros((*p.shape[:-2], p.shape[-1]))}
            else:
                state["exp_avg_sq"] = torch.zeros_like(p)
        square = gradient.square().add_(own.epsilon)
        if factored:
            scale = _inverse_root(state["sq_row"], state["sq_col"], square, own.beta2)
        else:
            scale = state["exp_avg_sq"].lerp_(square, 1 - own.beta2).rsqrt()
        update = scale * gradient
        size = update.square().mean().sqrt()
        update /= (size / own.clip_threshold).clamp(min=1.0)
        step = state["exp_avg"].lerp_(update, 1 - own.beta1)
        if factored:
            distance = (update - step).square().add_(own.residual_epsilon)
            step = _inverse_root(state["res_row"], state["res_col"], distance, own.beta3) * step
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(step, alpha=group["lr"])


def _inverse_root(row: Tensor, column: Tensor, square: Tensor, beta: float) -> Tensor:
    """1 / sqrt of the mean of squares that the moved means of rows [..., m] and columns [..., n] stand for."""
    row.lerp_(square.mean(-1), 1 - beta)
    column.lerp_(square.mean(-2), 1 - beta)
    return (row / row.mean(-1, keepdim=True)).rsqrt()[..., None] * column.rsqrt()[..., None, :]
