"""A run put together: all that it works with, brought to where it goes on from. Training is training_run.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType

from daguerre.checkpoint.run_folder import RunFolder, State
from daguerre.checkpoint.stop import StopSignals
from daguerre.checkpoint.store import Store
from daguerre.commands import class_pictures, description, out_of_memory, pictures_samples, resuming
from daguerre.commands.parts import BatchSizes, Parts, batch_sizes, build, refuse_cut_batches
from daguerre.config import Config
from daguerre.data import loader
from daguerre.data.dataset import Dataset, open_datasets
from daguerre.data.skips import Skips
from daguerre.errors import UserError
from daguerre.families.family import TextToImage
from daguerre.report import page
from daguerre.settings import Duration
from daguerre.training import device, loop, memory
from daguerre.training.progress import Progress, duration_text
from daguerre.training.sinks import MetricsFile, Sink, TensorBoard, read_metrics
from daguerre.training.state import TrainState


@dataclass(frozen=True)
class Intervals:
    """Lengths of a run in updates, from the recipe's durations; None is never."""

    total: int
    warmup: int
    decay: int
    log: int
    checkpoint: int | None
    validation: int | None


def intervals(config: Config, sizes: BatchSizes, samples_per_epoch: int | None) -> Intervals:
    """Durations in samples and epochs become updates of the global batch, rounded up."""

    def steps(duration: Duration) -> int:
        return duration.steps(sizes.whole, samples_per_epoch)

    total, decay = steps(config.training.duration), config.lr_scheduler.decay
    return Intervals(
        total=total,
        warmup=steps(config.lr_scheduler.warmup),
        decay=-(-total // 10) if decay is None else steps(decay),
        log=max(1, steps(config.logging.every)),
        checkpoint=None if config.checkpoint.every is None else max(1, steps(config.checkpoint.every)),
        validation=None if config.validation.every is None else max(1, steps(config.validation.every)),
    )


@dataclass(frozen=True)
class Run:
    """All that a run works with, once its folder is held."""

    config: Config
    folder: RunFolder
    store: Store
    parts: Parts
    sizes: BatchSizes
    every: Intervals
    dataset: Dataset
    held_out: Dataset
    state: TrainState
    loading: loader.Loading
    terminal: Progress
    sinks: list[Sink]
    flops_per_sample: float = 0.0
    """Counted in the first pass."""
    said: set[str] = field(default_factory=set)

    def status(self, state: State, reason: str = "") -> None:
        """Writes status.json."""
        now = self.state
        total = self.every.total
        self.folder.write_status(state, step=now.step, samples=now.samples, total_steps=total, reason=reason)

    def log(self, values: Mapping[str, float]) -> None:
        """One line of numbers at the present step."""
        for sink in self.sinks:
            sink.write(self.state.step, self.state.samples, values)

    def say(self, lines: Sequence[str]) -> None:
        """Lines for the person at the terminal, each once."""
        for line in lines:
            if line not in self.said:
                self.terminal.message(line)
        self.said.update(lines)

    def enough_memory(self) -> AbstractContextManager[None]:
        """For passes that train: running out of memory there is told in words, and ends the run."""
        facts = (self.config, self.store, self.parts, self.state, self.loading, self.sizes)

        def advice() -> str:
            self.say(["out of memory: looking for the micro-batch that fits"])
            return out_of_memory.of_training(*facts)

        return memory.explained("training", advice)


class FailureOnRecord:
    """Writes into the status why a run failed, and hands the error on."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        # On a full disk these fail too; the first error is the one to show.
        with suppress(OSError, UserError):
            self._run.status("failed", reason=f"{type(error).__name__}: {error}")
            page.write(self._run.folder.path)


def start(config: Config, folder: RunFolder, notices: Sequence[str], stack: ExitStack, stop: StopSignals) -> Run:
    """Puts the run together and brings it to where it goes on from."""
    beginning = resuming.begin(config, folder)
    parts = build(config)
    sizes = batch_sizes(config, beginning.global_batch_size)
    refuse_cut_batches(config, parts.objective, sizes)
    pictures_samples.check(config, parts)
    state = TrainState.start(parts.net, parts.objective, config.optimizer, config.ema, parts.numerics, config.seed)
    said = [*notices, *beginning.notices, *parts.numerics.notices(), *parts.family.remarks(parts.objective)]
    said += resuming.restore(state, beginning, config)
    if beginning.checkpoint is None:
        said += class_pictures.draw(config, parts, lambda: stop.exit_code)
    dataset, held_out = open_datasets(config.data, ["train", "held_out"])
    every = intervals(config, sizes, dataset.count)
    if config.optimizer.scale_lr:
        rate = config.optimizer.learning_rate
        said.append(
            f"learning rate {rate:g} x {sizes.whole} samples = {peak_learning_rate(config, sizes):g} (scale_lr)"
        )
    said += description.about_data(
        dataset, held_out, sizes.whole, every.validation is not None, isinstance(parts.family, TextToImage)
    )
    terminal = stack.enter_context(Progress(every.total))
    loading = loader.Loading(
        dataset, config.loader, config.seed, sizes.whole, sizes.micro, parts.draws, parts.family.cut,
        Skips(config.data.max_skipped, folder.skipped, terminal.message),
    )  # fmt: skip
    if beginning.checkpoint is not None:
        loading.restore(beginning.checkpoint.documents["loading"])
    else:
        loading.skips.begin()
    # Data that cannot be planned or read is refused here, before anything is written.
    probe = device.on(parts.device, loading.first(state.slots))
    resuming.record(config, folder, beginning, sizes.whole, description.parameter_counts(parts))
    for line in read_metrics(folder.metrics):
        terminal.remember(line.get("learning/loss"))
    run = Run(
        config, folder, Store(folder.checkpoints), parts, sizes, every, dataset, held_out, state, loading, terminal,
        sinks(config, folder, beginning.step, stack),
    )  # fmt: skip
    stack.enter_context(FailureOnRecord(run))
    left = max(0, every.total - state.step)
    with run.enough_memory():
        run = replace(run, flops_per_sample=description.training_flops_per_sample(parts, probe))
        seconds = description.probe_seconds(parts, probe) / len(probe.names) * sizes.whole * left if left else 0.0
    length = f"about {duration_text(seconds)} of training" if left else "all done"
    run.say([*description.headline(config, parts, sizes, left, length), *said, f"run folder: {folder.path}"])
    return run


def sinks(config: Config, folder: RunFolder, step: int | None, stack: ExitStack) -> list[Sink]:
    """Where numbers are written to, from `step` on; the stack closes them."""
    found: list[Sink] = [MetricsFile(folder.metrics)]
    found += [TensorBoard(folder.tensorboard, step)] if config.logging.tensorboard else []
    for sink in found:
        stack.callback(sink.close)
    return found


def peak_learning_rate(config: Config, sizes: BatchSizes) -> float:
    """The recipe's, times the global batch where it says `scale_lr`."""
    return config.optimizer.learning_rate * (sizes.whole if config.optimizer.scale_lr else 1)


def loop_plan(run: Run) -> loop.Plan:
    """What the loop needs of the recipe."""
    return loop.Plan(
        total_steps=run.every.total,
        learning_rate=peak_learning_rate(run.config, run.sizes),
        warmup_steps=run.every.warmup,
        lr_scheduler=run.config.lr_scheduler,
        max_grad_norm=run.config.training.max_grad_norm,
        max_nonfinite_steps=run.config.training.max_nonfinite_steps,
        log_every=run.every.log,
        decay_steps=run.every.decay,
    )
