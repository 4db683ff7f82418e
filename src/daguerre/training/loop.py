"""The training loop, through which every model is trained.

It sees a `loss_fn`, never a family, an image or a caption. It has no callbacks: it is a generator that yields after
each update, and its caller saves, samples, validates and logs.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from daguerre.training import passes, schedules, step
from daguerre.training.guard import READ_EVERY
from daguerre.training.precision.dtypes import Autocast
from daguerre.training.settings import LRSchedulerSettings
from daguerre.training.state import TrainState
from daguerre.types import Batch


@dataclass(frozen=True)
class LoopConfig:
    """The numbers of a run of the loop, resolved from the recipe."""

    total_steps: int
    learning_rate: float
    warmup_steps: int
    lr_scheduler: LRSchedulerSettings
    max_grad_norm: float | None
    max_nonfinite_steps: int
    logs: Callable[[int], bool]
    """True after the updates at which the device is read for numbers."""
    decay_steps: int = 0
    """Updates of the fall of warmup_stable_decay."""
    rise: schedules.Axis = int
    """Progress of the warm-up after so many updates, in its unit."""
    fall: schedules.Axis = int
    """Progress of the run, in the unit of its length."""

    def share_at(self, step: int) -> float:
        """Share of the peak learning rate in update `step`, from 0."""
        return schedules.factor(
            self.lr_scheduler, step, self.warmup_steps, self.total_steps, self.decay_steps, self.rise, self.fall
        )


@dataclass(frozen=True)
class Update:
    """One update, as the loop yields it."""

    step: int
    values: Mapping[str, float] | None
    """Numbers since the last reading on a step that logs, else None."""


def train(
    state: TrainState,
    batches: Iterator[Sequence[Batch]],
    loss_fn: passes.LossFn,
    config: LoopConfig,
    autocast: Autocast,
) -> Iterator[Update]:
    """Trains until `config.total_steps`, moving `state` in place, and yields after every update.

    `batches` yields the micro-batches of one update after the other, from the state's position in the plan, on the
    device. Raises NonFiniteError after `config.max_nonfinite_steps` non-finite updates in a row, naming the samples, at
    the first reading of the guard that finds them: with the numbers, and every `READ_EVERY` updates.
    """
    clock = Clock()
    # Once: whoever evaluates between two updates puts training mode back (`state.evaluating`).
    state.net.train()
    while state.step < config.total_steps:
        clock.start()
        micro_batches = next(batches)  # any number: buckets of large images are cut smaller
        clock.data_is_here()
        # The rate of update n + 1 is read at n, as in diffusers.
        slots, rate = state.slots, config.learning_rate * config.share_at(state.step)
        finite = step.update(
            state, micro_batches, loss_fn, learning_rate=rate, max_grad_norm=config.max_grad_norm, autocast=autocast
        )
        state.guard.note(state.step, finite, micro_batches)
        logs = config.logs(state.step) or state.step == config.total_steps
        # The only lines at which the host waits for the device: the guard's flags, then the numbers.
        if logs or state.step % READ_EVERY == 0:
            state.guard.check(config.max_nonfinite_steps, state.sharding)
        values = _numbers(state, rate) if logs else None
        # After the numbers: reading them waits for what was queued, so that the time is that of computing it.
        clock.stop(state.slots - slots)
        # No callbacks: what happens between updates is ordinary code of the caller, in the order of its lines.
        yield Update(state.step, values and values | clock.read())


def _numbers(state: TrainState, learning_rate: float) -> dict[str, float]:
    """Numbers since the last reading. Reads the device."""
    by_pattern = state.optimizer.learning_rates().items()
    return {
        "learning/current_learning_rate": learning_rate,
        "learning/nonfinite_steps": state.guard.counts()[0],
        **{f"learning/current_learning_rate/{pattern}": rate for pattern, rate in by_pattern},
        **state.scaler.read(),
        **state.meter.read(),
    }


class Clock:
    """Seconds of training since the last reading; time that the caller takes in between does not count."""

    def __init__(self) -> None:
        self._steps, self._samples, self._seconds, self._waited = 0, 0, 0.0, 0.0

    def start(self) -> None:
        """Begins an update."""
        self._started = time.perf_counter()

    def data_is_here(self) -> None:
        """Notes that the batches of the update have come."""
        self._waited += time.perf_counter() - self._started

    def stop(self, samples: int) -> None:
        """Ends the update (on a GPU: it is queued, and done if numbers were read)."""
        self._seconds += time.perf_counter() - self._started
        self._samples += samples
        self._steps += 1

    def read(self) -> dict[str, float]:
        """Means over the updates since the last reading."""
        values = {
            "perf/step_time_seconds": self._seconds / self._steps,
            "perf/samples_per_second": self._samples / self._seconds,
            "perf/data_wait_seconds": self._waited / self._steps,
        }
        self._steps, self._samples, self._seconds, self._waited = 0, 0, 0.0, 0.0
        return values
