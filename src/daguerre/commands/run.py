"""A run put together: all that it works with, brought to where it goes on from. Training is training_run.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from daguerre.checkpoint.run_folder import RunFolder, State
from daguerre.checkpoint.stop import StopSignals
from daguerre.checkpoint.store import Store
from daguerre.commands import class_pictures, description, pictures_samples, resuming
from daguerre.commands.parts import BatchSizes, Parts, batch_sizes, build, refuse_cut_batches
from daguerre.config import Config
from daguerre.data import loader
from daguerre.data.dataset import Dataset, open_datasets
from daguerre.data.skips import Skips
from daguerre.families.family import TextToImage
from daguerre.settings import Duration
from daguerre.training import device, loop
from daguerre.training.progress import Progress, duration_text
from daguerre.training.sinks import MetricsFile, Sink, TensorBoard
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
    flops_per_sample: float
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
    sinks: list[Sink] = [MetricsFile(folder.metrics)]
    sinks += [TensorBoard(folder.tensorboard, beginning.step)] if config.logging.tensorboard else []
    for sink in sinks:
        stack.callback(sink.close)
    flops = description.training_flops_per_sample(parts, probe)
    run = Run(
        config, folder, Store(folder.checkpoints), parts, sizes, every, dataset, held_out, state, loading, terminal,
        sinks, flops,
    )  # fmt: skip
    left = max(0, every.total - state.step)
    seconds = description.probe_seconds(parts, probe) / len(probe.names) * sizes.whole * left if left else 0.0
    length = f"about {duration_text(seconds)} of training" if left else "all done"
    run.say([*description.headline(config, parts, sizes, left, length), *said, f"run folder: {folder.path}"])
    return run


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
