"""One update: forward and backward over the micro-batches, clipping, finite guard, optimizer, EMA.

Nothing here waits for the device: whether an update is finite is decided on the device, before the
optimizer touches a weight, and read by the host only when numbers are logged.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from daguerre.training.optimizers.in_backward import spent
from daguerre.training.passes import LossFn, backward, summed
from daguerre.training.precision.dtypes import Autocast
from daguerre.training.sharding import UNSHARDED, Sharding, norms
from daguerre.training.state import TrainState
from daguerre.types import Batch


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
    idle = state.idle(micro_batches)
    if state.optimizer.in_backward:
        (batch,) = micro_batches
        loss, norm = move_in_backward(
            state, batch, loss_fn, valid, learning_rate=learning_rate, max_grad_norm=max_grad_norm, autocast=autocast,
            idle=idle,
        )  # fmt: skip
        finite = _finite(loss, norm)
    else:
        passed = backward if state.recorder is None else state.recorder.backward
        loss = passed(state.net, micro_batches, loss_fn, max(valid, 1), autocast, state.see, state.scaler, sharding)
        for p in idle:
            p.grad = None
        norm, factor = clip(state.parameters, max_grad_norm, state.scaler.inverse(), sharding)
        # Decided before any weight moves: by clipping, one NaN becomes a NaN in every gradient, moment and average.
        finite = _finite(loss, norm)
        state.move(learning_rate, _left_out(finite, valid), factor)
    state.meter.add_common("gradient_norm", norm)
    state.samples += valid
    state.slots += sum(len(batch.names) for batch in micro_batches) * sharding.ranks
    # An overflow by which fp16's scale finds its size is skipped like any other update, and is no fault.
    return finite | state.scaler.moved(loss, norm)


def _finite(loss: Tensor, norm: Tensor) -> Tensor:
    # Both are asked: the gradient of a finite loss may overflow, and that of an infinite one may be finite.
    return torch.isfinite(loss) & torch.isfinite(norm)


def _left_out(finite: Tensor, valid: int) -> Tensor:
    """True where an update is left out. Without gradients it would still move weights, by decay and by moments."""
    return torch.logical_not(finite) if valid else torch.ones_like(finite)


def move_in_backward(
    state: TrainState,
    batch: Batch,
    loss_fn: LossFn,
    valid: int,
    *,
    learning_rate: float,
    max_grad_norm: float | None,
    autocast: Autocast,
    idle: Collection[nn.Parameter] = (),
) -> tuple[Tensor, Tensor]:
    """An update in which each gradient is used and freed as soon as it is whole; returns loss and gradient norm.

    `after_norm`: a first backward pass finds the norm, a second one moves the weights: the update as ever. `at_once`
    has the second pass alone. Where a gradient is not finite there, what comes after it in the pass stays as it was,
    and the guard stops the run, as what came before has moved. Parameters in `idle` do not move.
    """
    loss = summed(state.net, batch, loss_fn, max(valid, 1), autocast, state.see)
    scaled, inverse = state.scaler.scaled(loss), state.scaler.inverse()
    loss = loss.detach()
    found: dict[nn.Parameter, Tensor] = {}

    def measure(p: nn.Parameter) -> None:
        if p not in idle and p.grad is not None:
            found[p] = norms([p.grad])

    factor, skip = inverse, _left_out(torch.isfinite(loss), valid)
    checks = state.optimizer.in_backward == "after_norm"
    if checks:
        with spent(state.parameters, measure):
            scaled.backward(retain_graph=True)
        whole, factor = clipped(_together(found, state.parameters, loss), max_grad_norm, inverse)
        skip = _left_out(_finite(loss, whole), valid)
    pieces = state.piecewise(learning_rate)

    def move(p: nn.Parameter) -> None:
        nonlocal skip
        if not checks:
            measure(p)
            skip = skip | torch.logical_not(torch.isfinite(found[p]).all()) if p in found else skip
        if p not in idle:
            pieces.move(p, skip, factor)

    with spent(state.parameters, move):
        scaled.backward()
    if not checks:
        whole = _together(found, state.parameters, loss)
        state.guard.note_torn(state.step + 1, torch.isfinite(loss) & torch.logical_not(torch.isfinite(whole)))
    state.finish(pieces, skip)
    return loss, whole


def _together(found: Mapping[nn.Parameter, Tensor], parameters: Sequence[nn.Parameter], like: Tensor) -> Tensor:
    """The norm of all gradients from those of each; 0 without any."""
    # In the order of the network, as `Sharding.norm` has it: the last digits of sums depend on it.
    each = [found[p] for p in parameters if p in found]
    return torch.linalg.vector_norm(torch.cat(each)) if each else torch.zeros_like(like)


def clip(
    trained: Sequence[nn.Parameter], max_norm: float | None, inverse: Tensor | None, sharding: Sharding = UNSHARDED
) -> tuple[Tensor, Tensor | None]:
    """The global norm of the gradients times `inverse`, and the factor of the gradients that makes it at most
    `max_norm`, None for one. The gradients stay as they are: those of 16 bits are multiplied in float32."""
    return clipped(sharding.norm(trained), max_norm, inverse)


def clipped(norm: Tensor, max_norm: float | None, inverse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The same of a norm that is known."""
    if inverse is not None:
        norm = norm * inverse
    if max_norm is None:
        return norm, inverse
    # 1e-6 as in torch's clip_grad_norm_, which fails on meshes of several axes and costs a pass over memory of its own.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return norm, factor if inverse is None else factor * inverse
