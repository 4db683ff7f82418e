"""One update: forward and backward over the micro-batches, clipping, finite guard, optimizer, EMA.

Nothing here waits for the device: whether an update is finite is decided on the device, before the
optimizer touches a weight, and read by the host only when numbers are logged.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from daguerre.training.precision.dtypes import Autocast
from daguerre.training.precision.loss_scaling import Scaler
from daguerre.training.sharding import UNSHARDED, Sharding
from daguerre.training.state import TrainState
from daguerre.types import Batch, LossTerms

LossFn = Callable[[nn.Module, Batch], LossTerms]
_UNSCALED = Scaler()


def update(
    state: TrainState,
    micro_batches: Sequence[Batch],
    loss_fn: LossFn,
    *,
    learning_rate: float,
    max_grad_norm: float | None,
    autocast: Autocast,
) -> Tensor:
    """Moves `state` by one update over one global batch and returns whether it was in order (0-dim bool tensor).

    The loss is the weighted sum over valid samples divided by their count in the whole global batch. An update whose
    loss or gradient is not finite, or that has no valid sample, leaves weights and moments as they were. It is not in
    order if the loss or gradient was not finite for another reason than too large a scale of the loss.
    """
    sharding = state.sharding
    # Dropout draws from torch's own generator. Seeded for each update, it needs no place in a checkpoint.
    torch.manual_seed(state.dropout_seed())
    # Known before the forward pass and over the CPU: every loss is divided by it, so that gradients are plain sums.
    valid = sharding.total(sum(int(batch.valid_B.sum()) for batch in micro_batches))
    loss = backward(state.net, micro_batches, loss_fn, max(valid, 1), autocast, state.see, state.scaler, sharding)
    state.leave_idle(micro_batches)
    # Before any weight moves: by clipping, one NaN becomes a NaN in every gradient, moment and average.
    norm, factor = clip(state.parameters, max_grad_norm, state.scaler.inverse(), sharding)
    state.meter.add_common("gradient_norm", norm)
    # Both are asked: the gradient of a finite loss may overflow, and that of an infinite one may be finite.
    finite = torch.isfinite(loss) & torch.isfinite(norm)
    # Without gradients an update would still move weights, by weight decay and by the moments of before.
    skip = torch.logical_not(finite) if valid else torch.ones_like(finite)
    state.move(learning_rate, skip, factor)
    state.samples += valid
    state.slots += sum(len(batch.names) for batch in micro_batches) * sharding.ranks
    # An overflow by which fp16's scale finds its size is skipped like any other update, and is no fault.
    return finite | state.scaler.moved(loss, norm)


def backward(
    net: nn.Module,
    micro_batches: Sequence[Batch],
    loss_fn: LossFn,
    valid: int,
    autocast: Autocast,
    see: Callable[[LossTerms, Tensor], None],
    scaler: Scaler = _UNSCALED,
    sharding: Sharding = UNSHARDED,
) -> Tensor:
    """Accumulates the gradients of the global batch, as the scaler has them; returns its loss, detached.

    `micro_batches` are this device's part of it, `valid` is the count of all. `see` is given the terms of each
    micro-batch and which of its slots are valid, on the device.
    """
    device = next(net.parameters()).device
    total = torch.zeros((), device=device)
    for number, batch in enumerate(micro_batches, 1):
        sharding.before_backward(net, last=number == len(micro_batches))
        valid_B = batch.valid_B.to(device, non_blocking=True)
        with autocast():
            terms = weighted(loss_fn(net, batch), batch)
        # `where` and not a product: the loss of an empty slot may be NaN, and NaN times 0 is NaN. Divided by the global
        # count here, micro-batches and devices of unequal sizes have their right weights.
        loss = torch.where(valid_B > 0, terms.loss_B, 0.0).sum() / valid
        scaler.scaled(loss).backward()  # outside autocast: each operation keeps the type of its forward pass
        total += loss.detach()
        see(terms, valid_B)
    sharding.after_backward()
    return sharding.sum(total)


def weighted(terms: LossTerms, batch: Batch) -> LossTerms:
    """The terms with each sample's loss times its weight; the count that the sum is divided by knows no weights."""
    if batch.weights_B is None:
        return terms
    weights_B = batch.weights_B.to(terms.loss_B.device, non_blocking=True)
    return replace(terms, loss_B=terms.loss_B * weights_B)


def clip(
    trained: Sequence[nn.Parameter], max_norm: float | None, inverse: Tensor | None, sharding: Sharding = UNSHARDED
) -> tuple[Tensor, Tensor | None]:
    """The global norm of the gradients times `inverse`, and the factor of the gradients that makes it at most
    `max_norm`, None for one. The gradients stay as they are: those of 16 bits are multiplied in float32."""
    norm = sharding.norm(trained)
    if inverse is not None:
        norm = norm * inverse
    if max_norm is None:
        return norm, inverse
    # 1e-6 as in torch's clip_grad_norm_, which fails on meshes of several axes and costs a pass over memory of its own.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return norm, factor if inverse is None else factor * inverse
