"""Running out of memory: advice in place of a traceback, and the largest micro-batch that fits."""

import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from daguerre.errors import FAILED, UserError
from daguerre.training import device, step
from daguerre.training.passes import LossFn, backward
from daguerre.training.precision.dtypes import Autocast
from daguerre.training.state import TrainState
from daguerre.types import Batch

# Errors for which torch has no type: they are plain RuntimeErrors, and their text is all that tells them.
_SIGNS = ("DefaultCPUAllocator: can't allocate memory", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED")


class OutOfMemory(UserError):
    """The device ran out of memory; the message says what can be made smaller."""

    exit_code = FAILED
    code = "resources"


def ran_out(error: RuntimeError | MemoryError) -> bool:
    """True if this error of torch means that memory ran out."""
    typed = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return typed or any(sign in str(error) for sign in _SIGNS)


@contextmanager
def explained(what: str, advice: Callable[[], str]) -> Iterator[None]:
    """Within the context, running out of memory is an OutOfMemory with advice, which is asked for once the memory of
    the failed computation is free again."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        # The frames of the failed computation hold its activations: before they are cleared nothing is free.
        traceback.clear_frames(error.__traceback__)
        free()
        # The first line has the sizes, the others torch's own advice.
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        text = text if len(text) < 300 else text[:300] + " ..."
        raise OutOfMemory(
            f"out of memory while {what}: {text}\n{advice()}\ndocs/trouble.md#out-of-memory lists more ways."
        ) from None


def free() -> None:
    """Gives back memory that nothing holds any more."""
    # Graphs of autograd have cycles, which reference counts do not free.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of these sizes (rising) for which `fits`, by halving the sizes left; None if none does."""
    # Halving: a try costs a whole update, and memory grows with the size.
    best, rest = None, list(sizes)
    while rest:
        middle = len(rest) // 2
        if fits(rest[middle]):
            best, rest = rest[middle], rest[middle + 1 :]
        else:
            rest = rest[:middle]
    return best


def divisors(whole: int, most: int) -> list[int]:
    """The sizes up to `most`, rising, into which a batch of `whole` can be cut."""
    return [size for size in range(1, min(whole, most) + 1) if whole % size == 0]


def update_fits(state: TrainState, batch: Batch, loss_fn: LossFn, autocast: Autocast) -> bool:
    """True if an update of `batch` fits: forward and backward pass, and an optimizer that skips the update.

    No weight and no moment moves, but moments that were never made are, so that they count. Counts of the optimizer and
    the meters do go on: the state is not to be trained on or saved afterwards.
    """
    fits, sharding, where = True, state.sharding, device.of(state.net)
    state.net.train()
    try:
        if state.optimizer.in_backward:
            # Of no valid sample: it moves nothing.
            step.move_in_backward(state, batch, loss_fn, 0, learning_rate=0.0, max_grad_norm=1.0, autocast=autocast)
        else:
            backward(
                state.net, [batch], loss_fn, len(batch.names), autocast, state.meter.add_terms, state.scaler, sharding
            )
            _, factor = step.clip(state.parameters, 1.0, state.scaler.inverse(), sharding)
            state.optimizer.step(0.0, torch.ones((), dtype=torch.bool, device=where), factor)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        fits = False
    state.optimizer.zero_grad()
    free()
    return fits
