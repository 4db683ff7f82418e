"""Learning rate as a function of the update: warm-up, then constant, linear or cosine. No state, no torch."""

from __future__ import annotations

import math

from daguerre.training.settings import LRSchedulerSettings


def factor(settings: LRSchedulerSettings, step: int, warmup_steps: int, total_steps: int) -> float:
    """Share of the peak learning rate at update `step` (from 0), in [0, 1]; equals diffusers' `get_scheduler`.

    linear and cosine reach zero at `total_steps`; a warm-up longer than the run is allowed and never peaks.
    """
    if step < warmup_steps:
        return step / warmup_steps
    if settings.name == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1.0 - progress if settings.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
