"""One update: forward and backward over the micro-batches, clipping, finite guard, optimizer, EMA.

Nothing here waits for the device: whether an update is finite is decided on the device, before the
optimizer touches a weight, and read by the host only when numbers are logged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from daguerre.training.meters import Meter
from daguerre.training.state import TrainState
from daguerre.types import Batch, LossTerms

LossFn = Callable[[nn.Module, Batch], LossTerms]
Autocast = Callable[[], AbstractContextManager[object]]


def update(
    state: TrainState,
    micro_batches: Sequence[Batch],
    loss_fn: LossFn,
    *,
    learning_rate: float,
    max_grad_norm: float | None,
    autocast: Autocast,
) -> Tensor:
    """Moves `state` by one update over one global batch and returns whether it was finite (0-dim bool tensor).

    The loss is the weighted sum over valid samples divided by their count in the whole global batch. An update whose
    loss or gradient is not finite, or that has no valid sample, leaves weights and moments as they were.
    """
    valid = sum(int(batch.valid_B.sum()) for batch in micro_batches)
    loss = backward(state.net, micro_batches, loss_fn, max(valid, 1), autocast, state.meter)
    finite = torch.isfinite(loss) & clip(state.parameters, max_grad_norm, state.meter)
    skip = torch.logical_not(finite) if valid else torch.ones_like(finite)
    state.optimizer.step(learning_rate, skip)
    state.optimizer.zero_grad()
    state.step += 1
    state.samples += valid
    state.slots += sum(len(batch.names) for batch in micro_batches)
    state.ema.update(state.step)
    return finite


def backward(
    net: nn.Module,
    micro_batches: Sequence[Batch],
    loss_fn: LossFn,
    valid: int,
    autocast: Autocast,
    meter: Meter,
) -> Tensor:
    """Accumulates the gradients of the global batch; returns its loss, detached."""
    device = next(net.parameters()).device
    total = torch.zeros((), device=device)
    for batch in micro_batches:
        valid_B = batch.valid_B.to(device, non_blocking=True)
        with autocast():
            terms = weighted(loss_fn(net, batch), batch)
        loss = torch.where(valid_B > 0, terms.loss_B, 0.0).sum() / valid
        loss.backward()
        total += loss.detach()
        meter.add_terms(terms, valid_B)
    return total


def weighted(terms: LossTerms, batch: Batch) -> LossTerms:
    """The terms with each sample's loss times its weight; the count that the sum is divided by knows no weights."""
    if batch.weights_B is None:
        return terms
    weights_B = batch.weights_B.to(terms.loss_B.device, non_blocking=True)
    return replace(terms, loss_B=terms.loss_B * weights_B)


def clip(trained: Sequence[nn.Parameter], max_norm: float | None, meter: Meter) -> Tensor:
    """Scales the gradients to a global norm of at most `max_norm`; returns whether the norm is finite."""
    parameters = [p for p in trained if p.grad is not None]
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
    if max_norm is not None:
        clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    meter.add_finite("gradient_norm", norm)
    return torch.isfinite(norm)
