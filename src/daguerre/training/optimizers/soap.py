"""SOAP (Vyas et al. 2024, arXiv 2409.11321): Adam in the directions in which gradients of a matrix vary."""

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from daguerre.training.optimizers.groups import ByGroup, Parameters, decay_groups
from daguerre.training.optimizers.optimizer import OptimizerPart
from daguerre.training.settings import AdamSettings


class Settings(AdamSettings):
    """SOAP (Vyas et al. 2024): Adam in the eigenbasis of Shampoo's statistics. The first update moves no weight."""

    made_with: ClassVar[tuple[str, ...]] = ("max_precondition_dim",)  # it says which statistics there are

    name: Literal["soap"] = "soap"
    """Name of the optimizer."""
    beta1: float = Field(0.95, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment, and of the statistics."""
    precondition_frequency: int = Field(10, ge=1)
    """Updates between two refreshes of the directions: each is a QR decomposition for every side of a matrix."""
    max_precondition_dim: int = Field(10_000, ge=1)
    """Largest side that has directions of its own, which take two matrices of this side; longer ones are left as they
    are. 1024 or less spares a LoRA the long side of its factors."""


def build(settings: Settings, trained: Parameters) -> list[OptimizerPart]:
    """One part, which the host asks before each update: a decomposition makes it wait anyway."""
    return [OptimizerPart(SOAP(decay_groups(settings, trained), settings), "asked", counters=("step",))]


def state_bytes(settings: Settings, name: str, shape: tuple[int, ...]) -> int:
    """Bytes of the state of one parameter: two moments, and for each side that has them statistics and directions."""
    return 8 * (math.prod(shape) + sum(shape[side] ** 2 for side in _sides(shape, settings.max_precondition_dim)))


def update_bytes(settings: Settings, name: str, shape: tuple[int, ...]) -> int:
    """Bytes taken during an update: the turned gradient and steps, one parameter at a time. `daguerre plan` cannot
    compute it without memory."""
    return 16 * math.prod(shape)


def _sides(shape: tuple[int, ...], longest: int) -> Iterator[int]:
    """The dims of a matrix or kernel that have directions."""
    return (side for side, length in enumerate(shape) if len(shape) > 1 and length <= longest)


class SOAP(ByGroup):
    """Algorithm 3 of the paper, as its authors' code has it: the first gradient makes the directions alone."""

    def __init__(self, params: list[dict[str, Any]], settings: Settings) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0, "step": 0})
        self._own = settings

    def _move(self, moved: list[nn.Parameter], group: dict[str, Any]) -> None:
        for p in moved:
            assert p.grad is not None
            self._move_one(p, p.grad, self.state[p], group)

    def _move_one(self, p: nn.Parameter, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        own, number = self._own, group["step"] - 1
        sides = list(_sides(p.shape, own.max_precondition_dim))
        if not state:
            state |= {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            state |= {f"{name}_{side}": p.new_zeros(2 * (p.shape[side],)) for side in sides for name in "gq"}
        if number:
            first = state["exp_avg"].lerp_(gradient, 1 - own.beta1)
            second = state["exp_avg_sq"].lerp_(_turned(gradient, state).square(), 1 - own.beta2)
            step = _turned(_turned(first, state) / second.sqrt().add_(own.epsilon), state, back=True)
            rate = group["lr"] * math.sqrt(1 - own.beta2**number) / (1 - own.beta1**number)
            p.sub_(step, alpha=rate).mul_(1 - group["lr"] * group["weight_decay"])
        for side in sides:
            others = [other for other in range(p.ndim) if other != side]
            state[f"g_{side}"].lerp_(torch.tensordot(gradient, gradient, dims=(others, others)), 1 - own.beta2)
            if not number:
                tiny = 1e-30 * torch.eye(p.shape[side], device=p.device, dtype=p.dtype)
                state[f"q_{side}"].copy_(torch.linalg.eigh(state[f"g_{side}"] + tiny).eigenvectors.flip(1))
            elif number % own.precondition_frequency == 0:
                _refresh(state, side)


def _turned(value: Tensor, state: dict[str, Tensor], back: bool = False) -> Tensor:
    """A tensor in the directions of its sides, or back from them."""
    for side in range(value.ndim):  # each takes the first dim and puts it last
        basis = state.get(f"q_{side}")
        value = value.movedim(0, -1) if basis is None else torch.tensordot(value, basis, dims=([0], [int(back)]))
    return value


def _refresh(state: dict[str, Tensor], side: int) -> None:
    """One power iteration of the directions of a side, by falling eigenvalues; the second moment goes with them."""
    basis, second = state[f"q_{side}"], state["exp_avg_sq"]
    power = state[f"g_{side}"] @ basis
    order = (basis * power).sum(0).argsort(descending=True)
    second.copy_(second.index_select(side, order))
    basis.copy_(torch.linalg.qr(power.index_select(1, order)).Q)
