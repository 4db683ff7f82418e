"""AdamW, clipping and the moving average in one pass over memory, on the state of torch's own AdamW.

The state keeps torch's names and values, so that a checkpoint does not know which of the two computed it. The count of
updates is one tensor for all parameters that have seen the same updates.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from daguerre.kernels import adamw_ema


@dataclass(frozen=True)
class Average:
    """Averages that follow the weights."""

    tensors: Mapping[nn.Parameter, Tensor]
    """The average of each parameter, float32."""
    share: float
    """Share of the new weights in it."""


def move(optimizer: torch.optim.Optimizer, skip: Tensor, factor: Tensor | None, average: Average | None) -> None:
    """One update of all groups with the gradients times `factor`, unless `skip`, and of the averages in any case."""
    for group in optimizer.param_groups:
        (beta1, beta2), share = group["betas"], average.share if average else 0.0
        rule = adamw_ema.Rule(group["lr"], group["weight_decay"], beta1, beta2, group["eps"], share)
        for step, some in _by_count(optimizer, group["params"]):
            adamw_ema.move(_tensors(optimizer, step, some, average), rule, skip, factor)
        # The average follows also where no gradient came: it may still be on its way to weights that stand still.
        still = [p for p in group["params"] if p.grad is None]
        if average and still:
            torch._foreach_lerp_([average.tensors[p] for p in still], still, average.share)


def _tensors(
    optimizer: torch.optim.Optimizer, step: Tensor, some: Sequence[nn.Parameter], average: Average | None
) -> adamw_ema.Tensors:
    states = [optimizer.state[p] for p in some]
    return adamw_ema.Tensors(
        some,
        [p.grad for p in some if p.grad is not None],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        step,
        [average.tensors[p] for p in some] if average else (),
    )


def _by_count(
    optimizer: torch.optim.Optimizer, every: Sequence[nn.Parameter]
) -> Iterator[tuple[Tensor, list[nn.Parameter]]]:
    """Those of all parameters of a group that move now, by their count of updates, which each of them then shares."""
    moved = [p for p in every if p.grad is not None]
    states: list[dict[str, Any]] = [optimizer.state[p] for p in moved]
    # By identity: comparing values would read the device in every update.
    begun = {id(state["step"]): state["step"] for state in states if state}
    if len(begun) > 1:  # one tensor each, as loaded
        values = torch.stack(list(begun.values())).tolist()  # reads the device, once after a load
        first = dict(zip(reversed(values), reversed(begun.values()), strict=True))
        begun = {key: first[value] for key, value in zip(begun, values, strict=True)}
    fresh = None
    together: dict[int, tuple[Tensor, list[nn.Parameter]]] = {}
    for p, state in zip(moved, states, strict=True):
        if not state:
            fresh = torch.zeros((), dtype=torch.float32, device=p.device) if fresh is None else fresh
            state |= {"step": fresh, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        else:
            state["step"] = begun[id(state["step"])]
        together.setdefault(id(state["step"]), (state["step"], []))[1].append(p)
    # Parameters without a gradient now keep a count of their own: that of the others goes on.
    for state in (optimizer.state[p] for p in every if p.grad is None and p in optimizer.state):
        if state and id(state["step"]) in together:
            state["step"] = state["step"].clone()
    yield from together.values()
