"""The schedule of a run in updates: intervals, length, and the learning rate after a new training.duration.

The learning rate is a function of recorded settings alone: a choice of lr_scheduler.on_new_duration becomes a stage of
lr_scheduler.stages, so that a run that is killed after the change goes on with the same rates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from daguerre.assembly.batch_sizes import BatchSizes
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.run.resume import StartPoint
from daguerre.settings import Duration
from daguerre.training import schedules
from daguerre.training.loop import LoopConfig
from daguerre.training.pace import Pace
from daguerre.training.settings import LRSchedulerSettings, Stage


@dataclass(frozen=True)
class Intervals:
    """Durations of a recipe in updates. Those that come again say after which updates; None is never."""

    total: int
    warmup: int
    decay: int
    log: Callable[[int], bool] | None
    checkpoint: Callable[[int], bool] | None
    backup: Callable[[int], int] | None
    """Counts the intervals that have gone by after so many updates."""
    validation: Callable[[int], bool] | None


def pace_of(start: StartPoint, sizes: BatchSizes, samples_per_epoch: int | None) -> Pace:
    """The pace of a run from its start point on: what was trained on before keeps its batch and the size of its
    epochs."""
    if start.step is None:
        return Pace.of(sizes.whole, samples_per_epoch)
    if "pace" in start.documents:
        before = Pace.read(start.documents["pace"])
    else:  # versions up to 0.1.0 counted samples alone
        state = start.documents["state"]
        mean = Fraction(state["slots"], state["step"]) if state["step"] else sizes.whole
        before = Pace.of(mean, samples_per_epoch)
    return before.then(start.step, sizes.whole, samples_per_epoch)


def intervals(config: Config, pace: Pace) -> Intervals:
    """Converts durations in samples and epochs to updates, rounded up."""
    checkpoint, every = config.checkpoint, config.validation.every
    # With the end that was planned first: a longer run must not move a decay that lies behind.
    total, first = pace.steps(config.training.duration), _resolved(config.lr_scheduler.stages, pace)
    return Intervals(
        total=total,
        warmup=pace.steps(config.lr_scheduler.warmup),
        decay=_decay_steps(config, pace, first[0].planned if first else total),
        log=None if config.logging.every is None else pace.due(config.logging.every),
        checkpoint=None if checkpoint.every is None else pace.due(checkpoint.every),
        backup=None if checkpoint.backup_every is None else pace.number(checkpoint.backup_every),
        validation=None if every is None else pace.due(every),
    )


def _decay_steps(config: Config, pace: Pace, end: int) -> int:
    """Updates of the fall of warmup_stable_decay, by default the last tenth of the run."""
    decay, unit = config.lr_scheduler.decay, config.training.duration.unit
    if decay is not None:
        return pace.steps_before(end, decay.number, decay.unit)
    return pace.steps_before(end, Fraction(pace.position(end, unit)) / 10, unit)


def _resolved(stages: Sequence[Stage], pace: Pace) -> list[Stage]:
    """The stages in updates of this pace."""
    resolved = []
    for stage in stages:
        planned = stage.planned if stage.ends is None else pace.steps(stage.ends)
        start = planned if stage.name == "hold" else stage.start
        resolved.append(stage.model_copy(update={"start": start, "planned": planned}))
    return resolved


def peak_learning_rate(config: Config, sizes: BatchSizes) -> float:
    """The recipe's, times the global batch with `scale_lr`."""
    return config.optimizer.learning_rate * (sizes.whole if config.optimizer.scale_lr else 1)


def loop_config(config: Config, sizes: BatchSizes, pace: Pace) -> LoopConfig:
    every, settings = intervals(config, pace), config.lr_scheduler
    stages = {"stages": _resolved(settings.stages, pace)}
    return LoopConfig(
        total_steps=every.total,
        learning_rate=peak_learning_rate(config, sizes),
        warmup_steps=every.warmup,
        lr_scheduler=settings.model_copy(update=stages),
        max_grad_norm=config.training.max_grad_norm,
        max_nonfinite_steps=config.training.max_nonfinite_steps,
        logs=every.log or (lambda step: False),
        decay_steps=every.decay,
        rise=partial(pace.position, unit=settings.warmup.unit),
        fall=partial(pace.position, unit=config.training.duration.unit),
    )


def settled(config: Config, start: StartPoint, sizes: BatchSizes, pace: Pace) -> tuple[Config, list[str]]:
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
    old, new = (loop_config(one, sizes, pace) for one in (before, config))
    # In the warm-up, or before a late decay, both have gone the same way: there is nothing to choose. Two updates are
    # compared, as schedules that restart can meet in one.
    same = all(old.share_at(step) == new.share_at(step) for step in (max(done - 2, 0), done - 1))
    if same or new.total_steps == old.total_steps or new.total_steps <= done:
        return config, []
    choice = config.lr_scheduler.on_new_duration
    if choice == "refuse":
        raise UserError(_choices(config, old, new, done), code="changed", setting="lr_scheduler.on_new_duration")
    if choice != "stretch":
        # Stages that were still to come are dropped.
        begun = [
            stage
            for stage, resolved in zip(settings.stages, old.lr_scheduler.stages, strict=True)
            if resolved.start < done
        ]
        config = _with_stages(config, [*begun, _stage(before, config, old, done, new.total_steps)])
        new = loop_config(config, sizes, pace)
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


def _stage(before: Config, config: Config, old: LoopConfig, done: int, total: int) -> Stage:
    """The stage of `hold` or `decay` after so many updates of a run that now has `total`. UserError if nothing would be
    learnt."""
    _, planned = schedules.under_way(old.lr_scheduler, done - 1, old.total_steps)
    number = sum(stage.start <= done - 1 for stage in old.lr_scheduler.stages)
    # The length as it was written, so that a later change of the batch moves the end of this stage with it.
    ends = [*(stage.ends for stage in before.lr_scheduler.stages), before.training.duration][number]
    name = config.lr_scheduler.on_new_duration
    assert name in ("hold", "decay")
    start = planned if name == "hold" else done
    share = config.lr_scheduler.restart_from or old.share_at(start)
    if not share and total <= start:  # a shorter run, which ends before the rate would stay as it is
        share = old.share_at(start - 1)
    if not share:
        raise UserError(
            f"lr_scheduler.on_new_duration={name}: the learning rate of this run is 0 after update {start:,}, so "
            "nothing more would be learnt. Set lr_scheduler.restart_from, the share of the peak learning rate to "
            "continue with, such as lr_scheduler.restart_from=0.1",
            code="missing",
            setting="lr_scheduler.restart_from",
        )
    length = {} if ends is None or ends.unit == "steps" else {"ends": ends}
    return Stage(start=start, planned=planned, name=name, share=share, **length)


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
