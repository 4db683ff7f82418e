"""One update of many tensors at once: clip factor, AdamW (Loshchilov and Hutter 2019), skip flag and moving average.

On a GPU one Triton kernel reads and writes each number once: 36 bytes a parameter, where separate passes over
gradients, weights, moments and averages move more. Elsewhere torch's fused AdamW is called directly, clips on its way
and shares one count of updates, and the averages follow in a second call. Whose tensors these are is the caller's
affair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from daguerre.kernels import available


@dataclass(frozen=True)
class Rule:
    """The numbers of one update."""

    learning_rate: float
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float
    average: float = 0.0
    """Share of the new weights that the averages take in, 1 - decay; 0 leaves the averages as they are."""


@dataclass(frozen=True)
class Tensors:
    """Tensors to update: lists of equal length, float32, on one device."""

    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    exp_avg: Sequence[Tensor]
    exp_avg_sq: Sequence[Tensor]
    step: Tensor
    """Updates that were not skipped, 0-dim float32, which all of them share."""
    averages: Sequence[Tensor] = ()
    """None, or one a parameter."""


@torch.no_grad()
def move(tensors: Tensors, rule: Rule, skip: Tensor, factor: Tensor | None) -> None:
    """Updates everything in place; where `skip` (0-dim bool) weights, moments and count stay, and the averages move
    towards weights that stand still. `factor` (0-dim) multiplies the gradients, which are spent afterwards."""
    kernels = _triton(tensors)
    if kernels is not None:
        kernels.move(tensors, rule, skip, factor)
    else:
        _by_torch(tensors, rule, skip, factor)


def _triton(tensors: Tensors) -> ModuleType | None:
    """The kernels where there are some for these tensors."""
    if not available.triton(tensors.step.device):
        return None
    columns = [tensors.parameters, tensors.gradients, tensors.exp_avg, tensors.exp_avg_sq]
    columns += [tensors.averages] if tensors.averages else []
    alike = all(_one_layout(row) for row in zip(*columns, strict=True))
    return available.module("adamw_ema") if alike else None


def _one_layout(row: Sequence[Tensor]) -> bool:
    """True if number i in memory belongs to the same element in each of these, without gaps."""
    first = row[0]
    dense = first.is_contiguous() or first.is_contiguous(memory_format=torch.channels_last)
    return dense and all(t.dtype == torch.float32 and _strides_alike(t, first) for t in row)


def _strides_alike(a: Tensor, b: Tensor) -> bool:
    """Leaves out dims of size 1, which move nothing: gradients of convolutions of size 1 and depthwise ones have
    strides there that their weights do not have."""
    if a.stride() == b.stride():
        return True
    return all(x == y for x, y, size in zip(a.stride(), b.stride(), b.shape, strict=True) if size != 1)


def _by_torch(tensors: Tensors, rule: Rule, skip: Tensor, factor: Tensor | None) -> None:
    skipped = skip.float()
    tensors.step.add_(1.0 - skipped)
    torch._fused_adamw_(
        list(tensors.parameters),
        list(tensors.gradients),
        list(tensors.exp_avg),
        list(tensors.exp_avg_sq),
        [],
        [tensors.step] * len(tensors.parameters),
        lr=rule.learning_rate,
        beta1=rule.beta1,
        beta2=rule.beta2,
        weight_decay=rule.weight_decay,
        eps=rule.epsilon,
        amsgrad=False,
        maximize=False,
        grad_scale=None if factor is None else factor.reciprocal(),
        found_inf=skipped,
    )
    if tensors.averages and rule.average:
        torch._foreach_lerp_(list(tensors.averages), list(tensors.parameters), rule.average)
