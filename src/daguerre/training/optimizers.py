"""Optimizers of the trained parameters. One function a name in OptimizerSettings; no schedule here."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from daguerre.training.settings import OptimizerSettings


def build(settings: OptimizerSettings, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW over two groups: tensors of two and more dims decay, biases and norms do not.

    The fused form is used: one kernel for all tensors, and a `found_inf` flag on the device that skips an
    update without asking the host (see `training.step`).
    """
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """The learning rate of the next update, the same for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors by `index.name`, in the order of its parameters."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items()}


def load_state_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Puts back what `state_tensors` gave; ValueError if it belongs to another set of parameters."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if state and sorted(state) != list(range(count)):
        raise ValueError(f"the optimizer state has {len(state)} parameters, this run trains {count}")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
