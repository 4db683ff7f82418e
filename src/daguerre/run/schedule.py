"""The schedule of a run in updates: intervals, length, and the learning rate after a new training.duration.

The learning rate is a function of recorded settings alone: a choice of lr_scheduler.on_new_duration becomes a stage of
lr_scheduler.stages, so that a run that is killed after the change goes on with the same rates.
"""

from dataclasses import dataclass

from daguerre.build.parts import BatchSizes
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.run.resume import StartPoint
from daguerre.settings import Duration
from daguerre.training import schedules
from daguerre.training.loop import LoopConfig
from daguerre.training.settings import LRSchedulerSettings, Stage


@dataclass(frozen=True)
class Intervals:
    """Durations of a recipe in updates; None is never."""

    total: int
    warmup: int
    decay: int
    log: int
    checkpoint: int | None
    backup: int | None
    validation: int | None


def intervals(config: Config, sizes: BatchSizes, samples_per_epoch: int | None) -> Intervals:
    """Converts durations in samples and epochs to updates of the global batch, rounded up."""

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


def peak_learning_rate(config: Config, sizes: BatchSizes) -> float:
    """The recipe's, times the global batch with `scale_lr`."""
    return config.optimizer.learning_rate * (sizes.whole if config.optimizer.scale_lr else 1)


def loop_config(config: Config, sizes: BatchSizes, samples_per_epoch: int | None) -> LoopConfig:
    every = intervals(config, sizes, samples_per_epoch)
    return LoopConfig(
        total_steps=every.total,
        learning_rate=peak_learning_rate(config, sizes),
        warmup_steps=every.warmup,
        lr_scheduler=config.lr_scheduler,
        max_grad_norm=config.training.max_grad_norm,
        max_nonfinite_steps=config.training.max_nonfinite_steps,
        log_every=every.log,
        decay_steps=every.decay,
    )


def settled(
    config: Config, start: StartPoint, sizes: BatchSizes, samples_per_epoch: int | None
) -> tuple[Config, list[str]]:
    """The config with the stages of its learning rate, and notices of a change. UserError if the duration is not the
    run's, the updates that are done would have had other rates, and lr_scheduler.on_new_duration does not choose."""
    done, known = start.step, start.schedule
    if not done or known is None:
        return config, []
    settings = LRSchedulerSettings.model_validate(known["lr_scheduler"])
    if not (settings.acts("stages") and config.lr_scheduler.acts("stages")):
        return config, []
    if not config.lr_scheduler.stages:
        config = _with_stages(config, settings.stages)
    training = config.training.model_copy(update={"duration": Duration(known["duration"])})
    before = config.model_copy(update={"training": training, "lr_scheduler": settings})
    old, new = (loop_config(one, sizes, samples_per_epoch) for one in (before, config))
    same = old.share_at(done - 1) == new.share_at(done - 1)
    if same or new.total_steps == old.total_steps or new.total_steps <= done:
        return config, []
    choice = config.lr_scheduler.on_new_duration
    if choice == "refuse":
        raise UserError(_choices(config, old, new, done), code="changed", setting="lr_scheduler.on_new_duration")
    if choice != "stretch":
        # Stages that were still to come are dropped.
        begun = [stage for stage in old.lr_scheduler.stages if stage.start < done]
        config = _with_stages(config, [*begun, _stage(config, old, done)])
        new = loop_config(config, sizes, samples_per_epoch)
    last, following, final = (
        _percent(rate) for rate in (old.share_at(done - 1), new.share_at(done), new.share_at(new.total_steps - 1))
    )
    return config, [
        f"{new.total_steps:,} updates instead of {old.total_steps:,} (lr_scheduler.on_new_duration={choice}): the "
        f"learning rate was {last} of its peak in update {done:,}, is {following} in the next one and {final} in the "
        "last"
    ]


def _with_stages(config: Config, stages: list[Stage]) -> Config:
    return config.model_copy(update={"lr_scheduler": config.lr_scheduler.model_copy(update={"stages": stages})})


def _stage(config: Config, old: LoopConfig, done: int) -> Stage:
    """The stage of `hold` or `decay` after so many updates. UserError if nothing would be learnt."""
    _, planned = schedules.under_way(old.lr_scheduler, done - 1, old.total_steps)
    name = config.lr_scheduler.on_new_duration
    assert name in ("hold", "decay")
    start = planned if name == "hold" else done
    share = config.lr_scheduler.restart_from or old.share_at(start)
    if not share:
        raise UserError(
            f"lr_scheduler.on_new_duration={name}: the learning rate of this run is 0 after update {start:,}, so "
            "nothing more would be learnt. Set lr_scheduler.restart_from, the share of the peak learning rate to "
            "continue with, such as lr_scheduler.restart_from=0.1",
            code="missing",
            setting="lr_scheduler.restart_from",
        )
    return Stage(start=start, planned=planned, name=name, share=share)


def _choices(config: Config, old: LoopConfig, new: LoopConfig, done: int) -> str:
    ended, final = old.share_at(old.total_steps), old.lr_scheduler.final

    def unless(rate: float) -> str:
        return (
            ""
            if rate
            else (": add lr_scheduler.restart_from=0.1 (a share of the peak), otherwise nothing would be learnt")
        )

    return (
        f"training.duration is {str(config.training.duration)!r} ({new.total_steps:,} updates), and this run was "
        f"planned for {old.total_steps:,} updates with a learning rate that falls until then "
        f"(lr_scheduler.name={old.lr_scheduler.name}); {done:,} are done.\nChoose how the learning rate goes on; now "
        f"it is {_percent(old.share_at(done))} of its peak:\n  lr_scheduler.on_new_duration=stretch   as if the new "
        f"length had been set from the start: now {_percent(new.share_at(done))}\n  "
        "lr_scheduler.on_new_duration=hold      the old schedule to its end, then its final rate, "
        f"{_percent(ended)}{unless(ended)}\n  lr_scheduler.on_new_duration=decay     a new decay from the current "
        f"rate to {_percent(final)} over the {new.total_steps - done:,} remaining "
        f"updates{unless(old.share_at(done))}\nA constant rate (lr_scheduler.name=constant) needs no such choice. "
        "See docs/optimizers.md."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
