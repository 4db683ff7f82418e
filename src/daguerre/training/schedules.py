"""Learning rate as a function of the update: a linear warm-up, then the shape that is chosen. No state, no torch."""

from __future__ import annotations

import math

from daguerre.training.settings import LRSchedulerSettings


def factor(
    settings: LRSchedulerSettings, step: int, warmup_steps: int, total_steps: int, decay_steps: int = 0
) -> float:
    """Share of the peak learning rate at update `step` (from 0), in [0, 1]; equals diffusers' `get_scheduler`.

    All but constant reach `settings.final` at `total_steps`. `decay_steps` is the fall of warmup_stable_decay; one that
    does not fit begins right after the warm-up. A warm-up longer than the run is allowed and never peaks.
    """
    if step < warmup_steps:
        return step / warmup_steps
    if settings.name == "constant":
        return 1.0
    begin = warmup_steps
    if settings.name == "warmup_stable_decay":
        begin = max(warmup_steps, total_steps - decay_steps)
    progress = min(1.0, max(0, step - begin) / max(1, total_steps - begin))
    return settings.final + (1.0 - settings.final) * _remaining(settings, progress)


def _remaining(settings: LRSchedulerSettings, progress: float) -> float:
    """What is left of a fall from 1 to 0 after a share of it."""
    shape = settings.decay_shape if settings.name == "warmup_stable_decay" else settings.name
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if shape == "sqrt":
        return 1.0 - math.sqrt(progress)
    return float((1.0 - progress) ** settings.power) if shape == "polynomial" else 1.0 - progress
