"""Builds a run and brings it to its start point. Training is run/trainer.py."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from daguerre import faults, ranks
from daguerre.assembly import base_digests, left_out, quantized_base
from daguerre.assembly.batch_sizes import BatchSizes, check_uncut_batches, couples_samples, shared_out
from daguerre.assembly.parts import Components, begin, build, load
from daguerre.assembly.roles import in_training
from daguerre.checkpoint.async_save import FailedSaves, Outcome, Saver
from daguerre.checkpoint.retention import RetentionPolicy
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
from daguerre.formatting import format_duration
from daguerre.memory import advice as memory_advice
from daguerre.objectives.objective import REFERENCE
from daguerre.report import page
from daguerre.run import (
    cached,
    class_images,
    distribute,
    lengths,
    preflight,
    reconstruction,
    resume,
    samples,
    schedule,
    state_io,
    summary,
    trackers,
)
from daguerre.run.schedule import Intervals, intervals
from daguerre.run.storage import RunStorage
from daguerre.tracking.console import Progress
from daguerre.tracking.sinks import Sink, read_metrics
from daguerre.training import device, oom
from daguerre.training.pace import Pace
from daguerre.training.state import TrainState
from daguerre.types import Batch


@dataclass(frozen=True)
class Run:
    """The objects of a run, once its folder is held."""

    config: Config
    folder: RunFolder
    processes: Processes
    saver: Saver
    parts: Components
    sizes: BatchSizes
    pace: Pace
    """By which lengths are counted."""
    every: Intervals
    dataset: Dataset
    held_out: Dataset
    validated: Dataset
    """The held-out samples as validation reads them: with cached features, where there are some."""
    state: TrainState
    loading: loader.Loading
    terminal: Progress
    sinks: list[Sink]
    gathered: distribute.GatheredModel
    base: base_digests.Base
    """Digests of the base that checkpoints stand on."""
    flops_per_sample: float = 0.0
    """Counted in the first pass."""
    shown: set[str] = field(default_factory=set)
    """Messages that were shown."""

    @cached_property
    def tags(self) -> Mapping[str, Mapping[str, int]]:
        """Tags of the captions, for headers of files; {} where they cannot be counted."""
        try:
            return loader.tags(self.dataset)
        except OSError:
            return {}

    def status(self, state: State, reason: str = "") -> None:
        """Writes status.json, on rank 0. RunFolderError if the folder is gone."""
        now, total = self.state, self.every.total
        if self.processes.leads:
            self.folder.check_not_moved()
            self.folder.write_status(state, step=now.step, samples=now.samples, total_steps=total, reason=reason)

    def page(self) -> None:
        """Writes the report, on rank 0."""
        if self.processes.leads:
            self.folder.check_not_moved()
            page.write(self.folder.path)

    def log(self, values: Mapping[str, float]) -> None:
        """One line of numbers at the present step."""
        for sink in self.sinks:
            with self.tolerant("writing metrics"):
                sink.write(self.state.step, self.state.samples, values)

    @contextmanager
    def tolerant(self, what: str) -> Iterator[None]:
        """Within the context an error of the disk is shown, and does not end the run."""
        try:
            yield
        except (OSError, RunFolderError) as error:
            why = str(error)
            if isinstance(error, OSError):
                why = f"{error.filename or self.folder.path}: {error.strerror or error}"
            self.terminal.message(f"{what} FAILED: {why}. Training continues, and the next save tries again")

    def say(self, lines: Sequence[str]) -> None:
        """Shows messages at the terminal, each once."""
        for line in lines:
            if line not in self.shown:
                self.terminal.message(line)
        self.shown.update(lines)

    def saved(self, outcomes: Sequence[Outcome]) -> None:
        """Shows the outcomes of saves that were written in the background."""
        for outcome in outcomes:
            for line in outcome.notices:
                self.terminal.message(line)

    def enough_memory(self) -> AbstractContextManager[None]:
        """Context of passes that train: running out of memory there ends the run with advice."""

        def advice() -> str:
            if self.processes.world.size > 1:  # others would have to take part in what is tried
                return memory_advice.of_several(self.config, self.saver)
            self.say(["out of memory: searching for the largest micro-batch that fits"])
            return memory_advice.of_training(self.config, self.saver, self.parts, self.state, self.loading, self.sizes)

        return oom.explained("training", advice)


def _record_failure(run: Run, _: type[BaseException] | None, error: BaseException | None, __: object) -> None:
    """Writes the reason of a failure into the status, as an exit callback; the error goes on."""
    if error is None or (run.processes.world.size > 1 and may_come_from_others(error)):
        return  # of several processes, a watchdog writes the root cause
    # On a full disk these fail too; the first error is the one to show.
    with suppress(OSError, UserError):
        run.status("failed", reason=scrub(f"{type(error).__name__}: {error}"))
        run.page()
    if not isinstance(error, (UserError, OSError, SystemExit, KeyboardInterrupt)):
        faults.recorded(error, run.folder.path)


def start(loaded: Loaded, storage: RunStorage, stack: ExitStack, stop: StopSignals, processes: Processes) -> Run:
    """Builds the run and brings it to its start point. For all ranks, while rank 0 holds the storage."""
    config, folder, world = loaded.config, storage.folder, processes.world
    processes.agreement.run_on_rank0(lambda: trackers.check(config.logging))
    mesh = config.mesh.resolved(world.size, world.nodes)
    store = state_io.store(storage, _ranks(config, processes))
    point = resume.find_start(loaded, folder, store, processes)
    sizes = shared_out(loaded, mesh, point.global_batch_size)
    networks = load(config, left_out.components(config))
    base = base_digests.of(config, *networks)
    if point.checkpoint is not None:
        base_digests.check_same_base(point.documents.get("base"), base, point.checkpoint.name)
    parts = build(config, processes.device, networks=networks, trains=True)
    check_uncut_batches(config, couples_samples(parts.objective, parts.net), sizes)
    samples.check(config, parts)
    notices = [*loaded.notices, *point.notices, *sizes.notices, *_of_networks(config, parts)]
    parts, state, first, of_state = _state(config, parts, point, mesh, processes, stop)
    dataset, held_out = open_datasets(config.data, ["train", "held_out"], parts.images, parts.columns)
    caches = cached.filled(config, parts, dataset, held_out, processes)
    if point.checkpoint is None:  # alike on every rank: an autoencoder that is in memory may be split over them
        notices += reconstruction.notices(config, parts, dataset, caches.encoded)
        notices += summary.describe_cut_captions(parts.family, dataset)
    config, of_lengths = lengths.fixed(config, point.lengths, dataset.count, sizes.whole)
    pace = schedule.pace_of(point, sizes, dataset.count)
    config, of_duration = schedule.settled(config, point, sizes, pace)
    every = intervals(config, pace)
    unseen = parts.attached.unseen(partial(loader.fixed_captions, dataset))
    notices += [*unseen, *of_state, *of_lengths, *of_duration, *caches.notices]
    notices += [*summary.describe_learning_rate(config, sizes), *summary.describe_warmup(every)]
    validates = every.validation is not None
    notices += summary.describe_data(dataset, held_out, sizes.whole, validates, parts.family.generates, parts.images)
    terminal = stack.enter_context(Progress(every.total, None if processes.leads else io.StringIO()))
    storage.say = terminal.message
    loading = _loading(config, folder, caches.wrap(dataset), parts, sizes, state, terminal, processes.leads)
    resume.restore_loading(loading, point, config)
    # Data that cannot be planned or read is refused here, before anything is written.
    probe = device.on(parts.device, loading.first(state.slots))
    if processes.leads:
        resume.record(config, folder, point, sizes, {"parameters": summary.parameter_counts(parts), **caches.about})
        for line in read_metrics(folder.metrics):
            terminal.remember(line.get("learning/loss"))
    own, keep = config.checkpoint, RetentionPolicy(config.checkpoint.keep, every.backup)
    run = Run(
        config, folder, processes, Saver(store, keep, FailedSaves(own.max_failed_saves), own.background), parts, sizes,
        pace, every, dataset, held_out, caches.wrap(held_out), state, loading, terminal,
        trackers.sinks(config, folder, point.step, terminal.message, stack) if processes.leads else [],
        distribute.GatheredModel(config, processes.leads), {**base, **first},
    )  # fmt: skip
    stack.push(partial(_record_failure, run))
    return _announced(run, probe, [*([f"{world}: {mesh}"] if world.size > 1 else []), *notices], storage)


def _of_networks(config: Config, parts: Components) -> list[str]:
    """Notices of the networks and of what they are to draw."""
    found = [*parts.numerics.notices(), *quantized_base.describe(parts.family.components)]
    return [*found, *parts.family.compatibility_warnings(parts.objective), *samples.prompt_notices(config)]


def _state(
    config: Config, parts: Components, point: resume.StartPoint, mesh: Mesh, processes: Processes, stop: StopSignals
) -> tuple[Components, TrainState, base_digests.Base, list[str]]:
    """The parts and the state around sharded networks, the digest of the first weights if the loss refers to them, and
    notices. Whatever needs whole networks comes first."""
    attached, refers = parts.attached, REFERENCE in parts.objective.needs.networks
    notices = resume.first_weights(attached, point, config, refers)
    first = base_digests.reference(attached.net, config) if refers else {}
    if refers and point.checkpoint is not None:
        notices = []  # of a start that was made before
        base_digests.check_same_reference(point.documents["base"], first, point.checkpoint.name)
    averages = resume.first_averages(attached, point, config)
    if point.checkpoint is None:
        with processes.watch.doing("generating class images"):
            notices += processes.agreement.run_on_rank0(
                lambda: class_images.generate_missing(config, parts, lambda: stop.exit_code)
            )
    sharding, of_mesh = distribute.shard_networks(config, parts, processes, mesh)
    state = begin(config, parts, sharding)
    # Before the checkpoint is restored, as the weights are still those before the first update.
    parts = in_training(parts, state)
    return parts, state, first, [*notices, *of_mesh, *resume.restore(state, point, config, averages)]


def _loading(
    config: Config, folder: RunFolder, dataset: Dataset, parts: Components, sizes: BatchSizes, state: TrainState,
    terminal: Progress, leads: bool,
) -> loader.Loading:  # fmt: skip
    skips = Skips(config.data.max_skipped, folder.skipped if leads else None, terminal.message)
    return loader.Loading(
        dataset, config.loader, config.seed, sizes.whole, sizes.micro, parts.draws, parts.family.truncated, skips,
        state.sharding.rank, state.sharding.ranks, pinned=parts.device.type == "cuda", images=parts.images,
        columns=parts.columns, layout=parts.family.layout,
        agreed=lambda count: max(state.sharding.gather(count)),
    )  # fmt: skip


def _announced(run: Run, probe: Batch, notices: Sequence[str], storage: RunStorage) -> Run:
    """Computes a first pass, which tells how long the run will take, and shows what will happen."""
    config, parts, sizes, left = run.config, run.parts, run.sizes, max(0, run.every.total - run.state.step)
    if left and config.training.compile:
        run.say(["compiling blocks: takes minutes the first time, less afterwards"])
    with run.enough_memory():
        run = replace(run, flops_per_sample=preflight.training_flops_per_sample(parts, probe))
        each = preflight.seconds(parts, probe) / len(probe.names) if left else 0.0
        if left and config.training.compile:
            preflight.check_compiled_code(parts, probe)
    seconds = each * sizes.whole / sizes.ranks * left
    length = f"about {format_duration(seconds)} of training" if left else "all done"
    run.say([*summary.headline(config, parts, sizes, left, length), *notices, f"run folder: {storage.name}"])
    return run


def _ranks(config: Config, processes: Processes) -> ranks.Ranks:
    """The ranks that save together: a group of its own, as saving goes on during training."""
    if processes.world.size == 1:
        return ranks.ALONE
    return ranks.over(processes.cpu_group(config.distributed.timeout_seconds))
