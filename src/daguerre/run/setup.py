"""A run put together: all that it works with, brought to where it goes on from. Training is run/trainer.py."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType

from daguerre import faults, ranks
from daguerre.build import base_digests
from daguerre.build.parts import BatchSizes, Parts, begin, build, shared_out
from daguerre.checkpoint.async_save import FailedSaves, Outcome, Saver
from daguerre.checkpoint.retention import Keep
from daguerre.checkpoint.run_dir import RunFolder, RunFolderError, State
from daguerre.checkpoint.signals import StopSignals
from daguerre.config.config import Config, Loaded
from daguerre.credentials import scrub
from daguerre.data.dataset import Dataset, open_datasets
from daguerre.data.loading import loader
from daguerre.data.skipped import Skips
from daguerre.distributed.mesh import Mesh
from daguerre.distributed.process_group import Processes
from daguerre.distributed.watchdog.watchdog import may_come_from_others
from daguerre.errors import UserError
from daguerre.formatting import duration_text
from daguerre.memory import advice as memory_advice
from daguerre.report import page
from daguerre.run import class_images, distribute, new_duration, preflight, resume, samples, stores, summary
from daguerre.run.intervals import Intervals, intervals
from daguerre.run.storage import Home
from daguerre.tracking.console import Progress
from daguerre.tracking.sinks import MetricsFile, Sink, TensorBoard, read_metrics
from daguerre.training import device, loop, oom
from daguerre.training.state import TrainState
from daguerre.types import Batch


@dataclass(frozen=True)
class Run:
    """All that a run works with, once its folder is held."""

    config: Config
    folder: RunFolder
    processes: Processes
    saver: Saver
    parts: Parts
    sizes: BatchSizes
    every: Intervals
    dataset: Dataset
    held_out: Dataset
    state: TrainState
    loading: loader.Loading
    terminal: Progress
    sinks: list[Sink]
    whole: distribute.Whole
    base: base_digests.Base
    """What checkpoints stand on."""
    flops_per_sample: float = 0.0
    """Counted in the first pass."""
    said: set[str] = field(default_factory=set)

    def status(self, state: State, reason: str = "") -> None:
        """Writes status.json, on the process that leads. RunFolderError where the folder is gone."""
        now, total = self.state, self.every.total
        if self.processes.leads:
            self.folder.refuse_if_moved()
            self.folder.write_status(state, step=now.step, samples=now.samples, total_steps=total, reason=reason)

    def page(self) -> None:
        """Writes the report, likewise."""
        if self.processes.leads:
            self.folder.refuse_if_moved()
            page.write(self.folder.path)

    def log(self, values: Mapping[str, float]) -> None:
        """One line of numbers at the present step."""
        for sink in self.sinks:
            with self.tolerant("writing metrics"):
                sink.write(self.state.step, self.state.samples, values)

    @contextmanager
    def tolerant(self, what: str) -> Iterator[None]:
        """Within the context a disk that refuses something is told, and does not end the run."""
        try:
            yield
        except (OSError, RunFolderError) as error:
            why = (
                f"{error.filename or self.folder.path}: {error.strerror or error}"
                if isinstance(error, OSError)
                else error
            )
            self.terminal.message(f"{what} FAILED: {why}. Training goes on, and the next time tries again")

    def say(self, lines: Sequence[str]) -> None:
        """Lines for the person at the terminal, each once."""
        for line in lines:
            if line not in self.said:
                self.terminal.message(line)
        self.said.update(lines)

    def saved(self, outcomes: Sequence[Outcome]) -> None:
        """What became of saves that were written meanwhile, for the person at the terminal."""
        for outcome in outcomes:
            for line in outcome.notices:
                self.terminal.message(line)

    def enough_memory(self) -> AbstractContextManager[None]:
        """For passes that train: running out of memory there is told in words, and ends the run."""
        facts = (self.config, self.saver, self.parts, self.state, self.loading, self.sizes)

        def advice() -> str:
            if self.processes.world.size > 1:  # others would have to take part in what is tried
                return memory_advice.of_several(self.config, self.saver)
            self.say(["out of memory: looking for the micro-batch that fits"])
            return memory_advice.of_training(*facts)

        return oom.explained("training", advice)


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
        if self._run.processes.world.size > 1 and may_come_from_others(error):
            return  # a watchdog writes the root cause
        # On a full disk these fail too; the first error is the one to show.
        with suppress(OSError, UserError):
            self._run.status("failed", reason=scrub(f"{type(error).__name__}: {error}"))
            self._run.page()
        if not isinstance(error, (UserError, OSError, SystemExit, KeyboardInterrupt)):
            faults.recorded(error, self._run.folder.path)


def start(loaded: Loaded, home: Home, stack: ExitStack, stop: StopSignals, processes: Processes) -> Run:
    """Puts the run together and brings it to where it goes on from. For all ranks, while rank 0 holds the home."""
    config, folder, world = loaded.config, home.folder, processes.world
    mesh = config.mesh.resolved(world.size, world.nodes)
    store = stores.store(home, _ranks(config, processes))
    beginning = resume.begin(loaded, folder, store, processes)
    sizes = shared_out(loaded, mesh, beginning.global_batch_size)
    parts = build(config, processes.device)
    samples.check(config, parts)
    stands_on = base_digests.of(config, parts)
    if beginning.checkpoint is not None:
        base_digests.refuse_another(beginning.documents.get("base"), stands_on, beginning.checkpoint.name)
    said = [*loaded.notices, *beginning.notices, *sizes.notices]
    said += [*parts.numerics.notices(), *parts.family.remarks(parts.objective)]
    said += samples.strange_words(config)
    state, told = _state(config, parts, beginning, mesh, processes, stop)
    dataset, held_out = open_datasets(config.data, ["train", "held_out"])
    config, changed = new_duration.settled(config, beginning, sizes, dataset.count)
    every = intervals(config, sizes, dataset.count)
    own, keep = config.checkpoint, Keep(config.checkpoint.keep, every.backup)
    saver = Saver(store, keep, FailedSaves(own.max_failed_saves), own.background)
    said += [*told, *changed, *_about_rate(config, sizes), *summary.about_warmup(every)]
    validates, draws = every.validation is not None, parts.family.generates
    said += summary.about_data(dataset, held_out, sizes.whole, validates, draws, parts.images)
    terminal = stack.enter_context(Progress(every.total, None if processes.leads else io.StringIO()))
    home.say = terminal.message
    skips = Skips(config.data.max_skipped, folder.skipped if processes.leads else None, terminal.message)
    loading = loader.Loading(
        dataset, config.loader, config.seed, sizes.whole, sizes.micro, parts.draws, parts.family.truncated, skips,
        state.sharding.rank, state.sharding.ranks, pinned=parts.device.type == "cuda", images=parts.images,
    )  # fmt: skip
    resume.restore_loading(loading, beginning, config)
    # Data that cannot be planned or read is refused here, before anything is written.
    probe = device.on(parts.device, loading.first(state.slots))
    if processes.leads:
        resume.record(config, folder, beginning, sizes, summary.parameter_counts(parts))
        for line in read_metrics(folder.metrics):
            terminal.remember(line.get("learning/loss"))
    run = Run(
        config, folder, processes, saver, parts, sizes, every, dataset, held_out, state, loading, terminal,
        sinks(config, folder, beginning.step, stack) if processes.leads else [],
        distribute.Whole(config, processes.leads), stands_on,
    )  # fmt: skip
    stack.enter_context(FailureOnRecord(run))
    return _announced(run, probe, [*([f"{world}: {mesh}"] if world.size > 1 else []), *said], home)


def _state(
    config: Config, parts: Parts, beginning: resume.Beginning, mesh: Mesh, processes: Processes, stop: StopSignals
) -> tuple[TrainState, list[str]]:
    """The state around networks that are spread over the mesh, and what to say of where it comes from. What needs whole
    networks comes first."""
    attached = parts.attached
    said = resume.first_weights(attached, beginning, config)
    averages = resume.first_averages(attached, beginning, config)
    if beginning.checkpoint is None:
        with processes.watch.doing("drawing class pictures"):
            said += distribute.led(processes, lambda: class_images.draw(config, parts, lambda: stop.exit_code))
    sharding, told = distribute.spread(config, parts, processes, mesh)
    state = begin(config, parts, sharding)
    return state, [*said, *told, *resume.restore(state, beginning, config, averages)]


def _announced(run: Run, probe: Batch, said: Sequence[str], home: Home) -> Run:
    """Computes a first pass, for how long the run will take, and says what will happen."""
    config, parts, sizes, left = run.config, run.parts, run.sizes, max(0, run.every.total - run.state.step)
    if left and config.training.compile:
        run.say(["compiling blocks: minutes the first time, less from then on"])
    with run.enough_memory():
        run = replace(run, flops_per_sample=preflight.training_flops_per_sample(parts, probe))
        each = preflight.seconds(parts, probe) / len(probe.names) if left else 0.0
        if left and config.training.compile:
            preflight.refuse_wrong_code(parts, probe)
    seconds = each * sizes.whole / sizes.ranks * left
    length = f"about {duration_text(seconds)} of training" if left else "all done"
    run.say([*summary.headline(config, parts, sizes, left, length), *said, f"run folder: {home.name}"])
    return run


def _about_rate(config: Config, sizes: BatchSizes) -> list[str]:
    if not config.optimizer.scale_lr:
        return []
    rate = config.optimizer.learning_rate
    return [f"learning rate {rate:g} x {sizes.whole} samples = {peak_learning_rate(config, sizes):g} (scale_lr)"]


def _ranks(config: Config, processes: Processes) -> ranks.Ranks:
    """Those that save together: a group of its own, as saving goes on beside training."""
    if processes.world.size == 1:
        return ranks.ALONE
    return ranks.over(processes.cpu_group(config.distributed.timeout_seconds))


def sinks(config: Config, folder: RunFolder, step: int | None, stack: ExitStack) -> list[Sink]:
    """Where numbers are written to, from `step` on; the stack closes them."""
    found: list[Sink] = [MetricsFile(folder.metrics)]
    found += [TensorBoard(folder.tensorboard, step)] if config.logging.tensorboard else []
    for sink in found:
        stack.callback(_close, sink)
    return found


def _close(sink: Sink) -> None:
    """What the disk refuses now must not hide why the run ends."""
    with suppress(OSError):
        sink.close()


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
