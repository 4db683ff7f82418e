"""When a run logs, saves, validates and ends, in updates."""

from __future__ import annotations

from dataclasses import dataclass

from daguerre.build.parts import BatchSizes
from daguerre.config.config import Config
from daguerre.settings import Duration


@dataclass(frozen=True)
class Intervals:
    """Lengths of a run in updates, from the recipe's durations; None is never."""

    total: int
    warmup: int
    decay: int
    log: int
    checkpoint: int | None
    backup: int | None
    validation: int | None


def intervals(config: Config, sizes: BatchSizes, samples_per_epoch: int | None) -> Intervals:
    """Durations in samples and epochs become updates of the global batch, rounded up."""

    def steps(duration: Duration) -> int:
        return duration.steps(sizes.whole, samples_per_epoch)

    total, decay, stages = steps(config.training.duration), config.lr_scheduler.decay, config.lr_scheduler.stages
    first = stages[0].planned if stages else total
    return Intervals(
        total=total,
        warmup=steps(config.lr_scheduler.warmup),
        decay=-(-first // 10) if decay is None else steps(decay),
        log=max(1, total if config.logging.every is None else steps(config.logging.every)),
        checkpoint=None if config.checkpoint.every is None else max(1, steps(config.checkpoint.every)),
        backup=None if config.checkpoint.backup_every is None else max(1, steps(config.checkpoint.backup_every)),
        validation=None if config.validation.every is None else max(1, steps(config.validation.every)),
    )
