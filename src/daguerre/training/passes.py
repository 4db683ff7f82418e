"""Forward and backward passes of an update: the gradients of its micro-batches, summed where the parameters have them.

A pass reads the tensors of a batch, and of the host nothing but shapes: what changes from one update to the next is in
tensors. So passes can be recorded and replayed (`performance/recording.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from daguerre.training import device
from daguerre.training.precision.dtypes import Autocast
from daguerre.training.precision.loss_scaling import Scaler
from daguerre.training.sharding import UNSHARDED, Sharding
from daguerre.types import Batch, LossTerms

LossFn = Callable[[nn.Module, Batch], LossTerms]
See = Callable[[LossTerms, Tensor], None]
"""What is given the terms of each micro-batch, and which of its slots are valid, on the device."""
_UNSCALED = Scaler()


def backward(
    net: nn.Module,
    micro_batches: Sequence[Batch],
    loss_fn: LossFn,
    valid: int | Tensor,
    autocast: Autocast,
    see: See,
    scaler: Scaler = _UNSCALED,
    sharding: Sharding = UNSHARDED,
) -> Tensor:
    """Accumulates the gradients of the global batch, as the scaler has them; returns its loss, detached.

    `micro_batches` are this device's part of it, `valid` is the count of all, or a 0-dim tensor of it on the device.
    """
    total = torch.zeros((), device=device.of(net))
    for number, batch in enumerate(micro_batches, 1):
        sharding.before_backward(net, last=number == len(micro_batches))
        loss = summed(net, batch, loss_fn, valid, autocast, see)
        scaler.scaled(loss).backward()  # outside autocast: each operation keeps the type of its forward pass
        total += loss.detach()
    sharding.after_backward()
    return sharding.sum(total)


def summed(net: nn.Module, batch: Batch, loss_fn: LossFn, valid: int | Tensor, autocast: Autocast, see: See) -> Tensor:
    """The losses of a micro-batch, which `see` is given, as its part of the mean over `valid` samples."""
    valid_B = batch.valid_B.to(device.of(net), non_blocking=True)
    with autocast():
        terms = weighted(loss_fn(net, batch), batch)
    see(terms, valid_B)
    # `where` and not a product: the loss of an empty slot may be NaN, and NaN times 0 is NaN. Divided by the global
    # count here, micro-batches and devices of unequal sizes have their right weights.
    # By a tensor also where the host knows it: a GPU divides by a number as it multiplies by its inverse, and recorded
    # passes must round as others do.
    count = valid if isinstance(valid, Tensor) else torch.full((), float(valid), device=valid_B.device)
    return torch.where(valid_B > 0, terms.loss_B, 0.0).sum() / count


def weighted(terms: LossTerms, batch: Batch) -> LossTerms:
    """The terms with each sample's loss times its weight; the count that the sum is divided by knows no weights."""
    if batch.weights_B is None:
        return terms
    weights_B = batch.weights_B.to(terms.loss_B.device, non_blocking=True)
    return replace(terms, loss_B=terms.loss_B * weights_B)
