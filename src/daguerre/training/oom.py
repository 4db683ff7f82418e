"""Running out of memory: what is said in place of a traceback, and the largest micro-batch that has room."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from daguerre.errors import FAILED, UserError
from daguerre.training import step
from daguerre.training.precision.dtypes import Autocast
from daguerre.training.state import TrainState
from daguerre.types import Batch

_SIGNS = ("DefaultCPUAllocator: can't allocate memory", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED")


class OutOfMemory(UserError):
    """The device has no room for what was asked; the message says of what there may be less."""

    exit_code = FAILED


def ran_out(error: RuntimeError | MemoryError) -> bool:
    """Whether this error of torch means that memory ran out."""
    told = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return told or any(sign in str(error) for sign in _SIGNS)


@contextmanager
def explained(what: str, advice: Callable[[], str]) -> Iterator[None]:
    """Within the context, running out of memory is an OutOfMemory that says during what, and what to do: `advice` is
    asked for once the memory of what failed is free again."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        traceback.clear_frames(error.__traceback__)
        free()
        raise OutOfMemory(f"out of memory while {what}: {first_line(error)}\n{advice()}") from None


def first_line(error: BaseException) -> str:
    """What torch says of sizes, without its advice."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text if len(text) < 300 else text[:300] + " ..."


def free() -> None:
    """Gives back what nothing holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of these sizes (rising) for which `fits`, by halving the sizes left; None if none does."""
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


def update_fits(state: TrainState, batch: Batch, loss_fn: step.LossFn, autocast: Autocast) -> bool:
    """Whether an update of `batch` has room: forward and backward pass, and an optimizer that leaves it out.

    No weight and no moment moves, but moments that were never made are, so that their room counts. What an optimizer
    and the meters count does go on: the state is not to be trained on or saved afterwards.
    """
    fits = True
    try:
        _rehearse(state, batch, loss_fn, autocast)
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        fits = False
    state.optimizer.zero_grad()
    free()
    return fits


def _rehearse(state: TrainState, batch: Batch, loss_fn: step.LossFn, autocast: Autocast) -> None:
    state.net.train()
    sharding = state.sharding
    step.backward(
        state.net, [batch], loss_fn, len(batch.names), autocast, state.meter.add_terms, state.scaler, sharding
    )
    _, factor = step.clip(state.parameters, 1.0, state.scaler.inverse(), sharding)
    skip = torch.ones((), dtype=torch.bool, device=state.parameters[0].device)
    state.optimizer.step(0.0, skip, factor)
    if skip.device.type == "cuda":
        torch.cuda.synchronize(skip.device)
