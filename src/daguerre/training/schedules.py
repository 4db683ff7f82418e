"""Learning rate as a function of the update: a linear warm-up, then the shape that is chosen. No state, no torch."""

import math
from collections.abc import Callable
from fractions import Fraction

from daguerre.training.settings import LRSchedulerSettings, Stage

Axis = Callable[[int], int | Fraction]
"""Progress of a run after so many updates; never less after more."""


def factor(
    settings: LRSchedulerSettings,
    step: int,
    warmup_steps: int,
    total_steps: int,
    decay_steps: int = 0,
    rise: Axis = int,
    fall: Axis = int,
) -> float:
    """Share of the peak learning rate at update `step` (from 0), in [0, 1]; equals diffusers' `get_scheduler`.

    All but constant reach `settings.final` at `total_steps`, which may have been changed on the way (`stages`).
    `decay_steps` is the fall of warmup_stable_decay; one that does not fit begins right after the warm-up. A warm-up
    longer than the run is allowed and never peaks. `rise` and `fall` say how far the run has come after so many
    updates, in the units of the warm-up and of the run's length.
    """
    begun, ends = under_way(settings, step, total_steps)
    if begun is None:
        if step < warmup_steps:
            return float(_share(rise, 0, step, warmup_steps))
        if settings.name == "constant":
            return 1.0
        begin = warmup_steps
        if settings.name == "warmup_stable_decay":
            begin = max(warmup_steps, ends - decay_steps)
        progress = min(1.0, max(0.0, _share(fall, begin, step, ends)))
        return settings.final + (1.0 - settings.final) * _remaining(settings, progress, settings.num_cycles)
    if begun.name == "hold":
        return begun.share
    progress = min(1.0, _share(fall, begun.start, step, ends))
    return settings.final + (begun.share - settings.final) * _remaining(settings, progress)


def _share(along: Axis, start: int, step: int, end: int) -> float:
    """The part of the way from `start` to `end` that is done."""
    whole = along(max(end, start + 1)) - along(start)  # a fall of no length is over at once
    return float((along(step) - along(start)) / whole) if whole else 1.0


def under_way(settings: LRSchedulerSettings, step: int, total_steps: int) -> tuple[Stage | None, int]:
    """The stage of update `step`, None for the schedule itself; and the update at which that was to end."""
    begun = [stage for stage in settings.stages if stage.start <= step]
    ends = [*(stage.planned for stage in settings.stages), total_steps]
    return begun[-1] if begun else None, ends[len(begun)]


def _remaining(settings: LRSchedulerSettings, progress: float, cycles: int = 1) -> float:
    """The rest of a fall from 1 to 0 after a share of it; of several such falls, if it restarts."""
    shape = settings.decay_shape if settings.name == "warmup_stable_decay" else settings.name
    if shape in ("cosine", "cosine_with_restarts"):
        within = cycles * progress % 1.0 if progress < 1.0 else 1.0
        return 0.5 * (1.0 + math.cos(math.pi * within))
    if shape == "sqrt":
        return 1.0 - math.sqrt(progress)
    return float((1.0 - progress) ** settings.power) if shape == "polynomial" else 1.0 - progress
