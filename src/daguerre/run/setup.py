"""Builds a run and brings it to its start point. Training is run/trainer.py."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from daguerre import faults, ranks, webhook
from daguerre.assembly import (
    assistant,
    base_digests,
    caption_words,
    float8_layers,
    left_out,
    offloaded,
    quantized_base,
    recorded,
    swapped,
)
from daguerre.assembly.batch_sizes import BatchSizes, check_uncut_batches, shared_out
from daguerre.assembly.parts import Components, begin, build, load
from daguerre.assembly.roles import in_training
from daguerre.checkpoint.async_save import FailedSaves, Outcome, Saver
from daguerre.checkpoint.retention import RetentionPolicy
from daguerre.checkpoint.run_dir import RunFolder, RunFolderError, State
from daguerre.checkpoint.sharded import ShardedStore
from daguerre.checkpoint.signals import StopSignals
from daguerre.config.config import Config, Loaded
from daguerre.credentials import scrub
from daguerre.data.caption_digests import CaptionDigests
from daguerre.data.dataset import Dataset, open_datasets
from daguerre.data.loading import loader
from daguerre.data.skipped import Skips
from daguerre.distributed.mesh import Mesh
from daguerre.distributed.process_group import Processes
from daguerre.distributed.watchdog.watchdog import may_come_from_others
from daguerre.errors import UserError
from daguerre.evaluation.formulas import jackknife
from daguerre.evaluation.outcome import features
from daguerre.evaluation.outcome import outcome as comparison
from daguerre.formatting import format_duration
from daguerre.memory import advice as memory_advice
from daguerre.memory import waiting
from daguerre.objectives.objective import REFERENCE
from daguerre.report import page
from daguerre.run import (
    cached,
    class_images,
    distribute,
    lengths,
    preflight,
    probe,
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
    stop: StopSignals
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

    def record_recipe(self) -> None:
        """Writes the recipe that the run has gone on with, on rank 0."""
        if self.processes.leads:
            resume.record_recipe(self.config, self.folder, self.sizes)

    def status(self, state: State, reason: str = "", since: str = "") -> None:
        """Writes status.json, on rank 0. RunFolderError if the folder is gone."""
        now, total = self.state, self.every.total
        if self.processes.leads:
            self.folder.check_not_moved()
            self.folder.write_status(
                state, step=now.step, samples=now.samples, total_steps=total, reason=reason, since=since
            )
            if state != "running" and (why := webhook.tell(self.folder.path, state, reason, now.step, total)):
                self.say([why])

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


class _Origin(NamedTuple):
    """The point that a run goes on from, and the cut of its batches."""

    mesh: Mesh
    store: ShardedStore
    point: resume.StartPoint
    sizes: BatchSizes
    config: Config
    """With the number of blocks that wait."""
    notices: list[str]


class _Model(NamedTuple):
    """Networks on their mesh, as the run goes on with them."""

    parts: Components
    state: TrainState
    base: base_digests.Base
    notices: list[str]


class _Samples(NamedTuple):
    """The samples of both splits, and what a cache has of them."""

    dataset: Dataset
    held_out: Dataset
    caches: cached.Cached
    notices: list[str]


def start(loaded: Loaded, storage: RunStorage, stack: ExitStack, stop: StopSignals, processes: Processes) -> Run:
    """Builds the run and brings it to its start point. For all ranks, while rank 0 holds the storage."""
    # Each step needs what those before it settle, and all that can refuse the run comes before the first write:
    # 1. the origin: a checkpoint says how batches were cut, and which base it stands on;
    # 2. the model: whole networks are compared with that base, and only then split over the mesh;
    # 3. the samples: the parts say which images of a sample are read, and split networks fill a cache together;
    # 4. the lengths: an epoch is counted in the samples that were chosen;
    # 5. a first batch: data that cannot be planned or read is refused while the folder is as it was;
    # 6. the record, and only then what goes on writing: metrics, saves, the reason of a failure.
    loaded = replace(loaded, config=caption_words.fixed(loaded.config))
    processes.agreement.run_on_rank0(lambda: trackers.check(loaded.config.logging))
    origin = _origin(loaded, storage, processes)
    config, leads = origin.config, processes.leads
    model = _model(config, origin, processes, stop)
    chosen = _samples(config, origin.point, model.parts, processes)
    config, pace, every, of_lengths = _lengths(config, origin, chosen.dataset)
    terminal = stack.enter_context(Progress(every.total, None if leads else io.StringIO()))
    storage.say = terminal.message
    captions = CaptionDigests(chosen.dataset)
    texts, of_captions = processes.agreement.run_on_rank0(
        lambda: resume.restore_captions(captions, origin.point, config, storage.folder)
    )
    loading = _loading(config, storage.folder, chosen, model, origin, texts, terminal, leads)
    batch = device.on(model.parts.device, loading.first(model.state.slots))
    if leads:
        captions.save(storage.folder.captions)
        _record(config, storage.folder, origin, model.parts, chosen.caches, terminal)
    run = Run(
        config=config,
        folder=storage.folder,
        processes=processes,
        saver=_saver(config, origin.store, every),
        parts=model.parts,
        sizes=origin.sizes,
        pace=pace,
        every=every,
        dataset=chosen.dataset,
        held_out=chosen.held_out,
        validated=chosen.caches.wrap(chosen.held_out),
        state=model.state,
        loading=loading,
        stop=stop,
        terminal=terminal,
        sinks=trackers.sinks(config, storage.folder, origin.point.step, terminal.message, stack) if leads else [],
        gathered=distribute.GatheredModel(config, leads),
        base=model.base,
    )
    stack.push(partial(_record_failure, run))
    found = [*loaded.notices, *origin.notices, *model.notices, *chosen.notices, *of_captions]
    return _announced(run, batch, [*_of_mesh(origin, processes), *found, *of_lengths, *_of_data(run)], storage)


def _origin(loaded: Loaded, storage: RunStorage, processes: Processes) -> _Origin:
    config, world = loaded.config, processes.world
    mesh = config.mesh.resolved(world.size, world.nodes)
    store = state_io.store(storage, _ranks(config, processes))
    point = resume.find_start(loaded, storage.folder, store, processes)
    sizes = shared_out(loaded, mesh, point.global_batch_size)
    config, of_blocks = waiting.fixed(config, mesh, sizes, processes.device, processes.agreement.run_on_rank0)
    return _Origin(mesh, store, point, sizes, config, [*of_blocks, *point.notices, *sizes.notices])


def _model(config: Config, origin: _Origin, processes: Processes, stop: StopSignals) -> _Model:
    point = origin.point
    networks = load(config, left_out.components(config), defers=True)
    # Of the weights as their files have them: `build` reads them, changes types, quantises and moves.
    digests = base_digests.begun(config, *networks)
    if point.checkpoint is not None:
        base_digests.check_components(point.documents.get("base"), digests.places, point.checkpoint.name)
    parts = build(config, processes.device, networks=networks, trains=True)
    base = digests.ended()
    if point.checkpoint is not None:
        base_digests.check_same_base(point.documents.get("base"), base, point.checkpoint.name)
    check_uncut_batches(config, origin.sizes, parts.objective, parts.net)
    samples.check(config, parts)
    notices = _of_networks(config, parts, processes.world.local_size)
    # Here, before the data are opened, class images are generated: they are among the data.
    parts, state, first, of_state = _state(config, parts, point, origin.mesh, processes, stop)
    return _Model(parts, state, {**base, **first}, [*notices, *of_state])


def _samples(config: Config, point: resume.StartPoint, parts: Components, processes: Processes) -> _Samples:
    dataset, held_out = open_datasets(config.data, ["train", "held_out"], parts.images, parts.columns)
    caches = cached.filled(config, parts, dataset, held_out, processes)
    notices: list[str] = []
    if point.checkpoint is None:  # on every rank: an autoencoder that is in memory may be split over them
        notices += reconstruction.notices(config, parts, dataset, caches.encoded)
        notices += summary.describe_cut_captions(parts.family, dataset)
        notices += probe.check(config, parts, caches.wrap(dataset), processes)
    notices += parts.attached.unseen(partial(loader.fixed_captions, dataset))
    return _Samples(dataset, held_out, caches, [*notices, *caches.notices])


def _lengths(config: Config, origin: _Origin, dataset: Dataset) -> tuple[Config, Pace, Intervals, list[str]]:
    """The config with its lengths fixed, the pace and the intervals that follow from it, and notices."""
    config, notices = lengths.fixed(config, origin.point.lengths, dataset.count, origin.sizes.whole)
    pace = schedule.pace_of(origin.point, origin.sizes, dataset.count)
    config, of_duration = schedule.settled(config, origin.point, origin.sizes, pace)
    every = intervals(config, pace)
    rate = [*summary.describe_learning_rate(config, origin.sizes), *summary.describe_warmup(every)]
    return config, pace, every, [*notices, *of_duration, *rate]


def _record(
    config: Config, folder: RunFolder, origin: _Origin, parts: Components, caches: cached.Cached, terminal: Progress
) -> None:
    """Writes into the run's folder what the run is, and reads back the numbers that it has logged."""
    about = {"parameters": summary.parameter_counts(parts), **caches.about}
    resume.record(config, folder, origin.point, origin.sizes, about)
    for line in read_metrics(folder.metrics):
        terminal.remember(line.get("learning/loss"))
    terminal.log_to(folder.log)


def _saver(config: Config, store: ShardedStore, every: Intervals) -> Saver:
    keep = RetentionPolicy(config.checkpoint.keep, every.backup)
    return Saver(store, keep, FailedSaves(config.checkpoint.max_failed_saves), config.checkpoint.background)


def _of_mesh(origin: _Origin, processes: Processes) -> list[str]:
    return [f"{processes.world}: {origin.mesh}"] if processes.world.size > 1 else []


def _of_data(run: Run) -> list[str]:
    validation, validates = run.config.validation, run.every.validation is not None
    scores = run.parts.family.generates and not validation.compared_images  # which ends in a table of its own
    instead = ""
    with suppress(UserError):
        comparison.check(run.parts)
        features.check(run.parts)
        if run.config.sampling.num_images:
            instead = f"; validation.compared_images={jackknife.FEWEST} gives one, compared with the base"
    of_data = (run.dataset, run.held_out, run.sizes.whole)
    return summary.describe_data(*of_data, validates, scores, run.parts.images, instead)


def _of_networks(config: Config, parts: Components, processes: int) -> list[str]:
    """Notices of the networks, which each of so many processes of a node holds, and of what they are to draw."""
    found = [*parts.numerics.notices(), *quantized_base.describe(parts.family.components)]
    found += [*float8_layers.describe(parts.net), *swapped.notices(config, parts.swaps, processes)]
    found += [*assistant.notices(config, parts.family), *offloaded.notices(parts.family, parts.device.type == "cpu")]
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
    state.recorder = recorded.recorder(config, parts)
    return parts, state, first, [*notices, *of_mesh, *resume.restore(state, point, config, averages)]


def _loading(
    config: Config,
    folder: RunFolder,
    chosen: _Samples,
    model: _Model,
    origin: _Origin,
    captions: list[dict[str, Any]],
    terminal: Progress,
    leads: bool,
) -> loader.Loading:
    """The batches of the run from its start point on."""
    parts, sharding = model.parts, model.state.sharding
    loading = loader.Loading(
        chosen.caches.wrap(chosen.dataset),
        config.loader,
        config.seed,
        origin.sizes.whole,
        origin.sizes.micro,
        parts.draws,
        parts.family.truncated,
        Skips(config.data.max_skipped, folder.skipped if leads else None, terminal.message),
        sharding.rank,
        sharding.ranks,
        pinned=parts.device.type == "cuda",
        images=parts.images,
        columns=parts.columns,
        layout=parts.family.layout,
        captions=captions,
        agreed=lambda count: max(sharding.gather(count)),
    )
    resume.restore_loading(loading, origin.point, config)
    return loading


def _announced(run: Run, batch: Batch, notices: Sequence[str], storage: RunStorage) -> Run:
    """Computes a first pass, which tells how long the run will take, and shows what will happen."""
    config, parts, sizes, left = run.config, run.parts, run.sizes, max(0, run.every.total - run.state.step)
    if left:
        run.say([summary.describe_first_pass(batch)])
    if left and config.training.compile:
        run.say(["compiling blocks: takes minutes the first time, less afterwards"])
    with run.enough_memory():
        run = replace(run, flops_per_sample=preflight.training_flops_per_sample(parts, batch))
        compiles = bool(config.training.compile)
        each = preflight.seconds(parts, batch, compiles) / len(batch.names) if left else 0.0
        if left and compiles:
            preflight.check_compiled_code(parts, batch)
    seconds = each * sizes.whole / sizes.ranks * left
    length = f"about {format_duration(seconds)} of training" if left else "all done"
    # Now, as a network may have been read after captions were encoded.
    unread = [] if parts.family.pretrained is None else parts.family.pretrained.unread
    run.say([*summary.headline(config, parts, sizes, left, length), *unread, *notices, f"run folder: {storage.name}"])
    return run


def _ranks(config: Config, processes: Processes) -> ranks.Ranks:
    """The ranks that save together: a group of its own, as saving goes on during training."""
    if processes.world.size == 1:
        return ranks.ALONE
    return ranks.over(processes.cpu_group(config.distributed.timeout_seconds))
