"""A training run, in the order in which things happen: the loop computes; saves, samples and reports are here.

Order of a save: the numbers of the step, the checkpoint, then sample images, export and report. A run that is killed in
between makes on restart what is missing.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from signal import Signals

import numpy as np
import torch

from daguerre import __version__, documents, plugins, system
from daguerre.adapters.adapter import Attached
from daguerre.assembly import about
from daguerre.checkpoint.atomic import write_json_atomically
from daguerre.checkpoint.signals import StopSignals
from daguerre.config.config import Loaded
from daguerre.data.dataset import Dataset, Member
from daguerre.data.loading import loader
from daguerre.distributed.launch import environment
from daguerre.distributed.launch.environment import World
from daguerre.errors import ReportedElsewhere, UserError
from daguerre.evaluation import images as measured_images
from daguerre.evaluation.metric import DrawnInputs
from daguerre.formatting import counted
from daguerre.generation import generate
from daguerre.generation.generate import ImageRequest
from daguerre.memory import advice
from daguerre.models import encoders
from daguerre.remote import local_copy
from daguerre.run import resume, samples, state_io, trackers
from daguerre.run.distribute import process_group
from daguerre.run.schedule import loop_config
from daguerre.run.setup import Run, start
from daguerre.run.storage import RunStorage
from daguerre.tracking.sinks import read_metrics
from daguerre.training import device, loop, oom, profiler, validation
from daguerre.training.state import evaluating
from daguerre.types import IMAGE, Batch


def train(loaded: Loaded, storage: RunStorage) -> int:
    """Trains until the recipe's duration, a signal or an error; returns the exit code. For all processes of a run."""
    config = loaded.config
    check_mesh(loaded, storage, environment.read())
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignals(launched=environment.read().launcher != "none"))
        processes = stack.enter_context(process_group(config, storage, stop))
        # Before anything is read: what a run finds in its folder must not change while it starts.
        processes.agreement.run_on_rank0(lambda: stack.enter_context(storage.hold()))
        run = start(loaded, storage, stack, stop, processes)
        stack.callback(run.saver.wait)  # an error does not cut off a save, nor let go of the folder before it has ended
        if run.state.step >= run.every.total and processes.agreement.run_on_rank0(lambda: was_finished(run)):
            run.say([f"this run is finished: {counted(run.state.step, 'update')}. {where(run)}"])
            return 0
        run.status("running")
        publish_if_missing(run)
        plan = loop_config(run.config, run.sizes, run.pace)
        updates = loop.train(run.state, batches(run, stack), run.parts.loss, plan, run.parts.autocast)
        # Closed by name: a generator that is only dropped ends when it is collected, maybe without the others.
        updates = stack.enter_context(closing(profiled(run, updates)))
        signal, begun = None, run.state.step
        if begun >= run.every.total:
            record_recipe(run)
        with run.enough_memory():
            for update in updates:
                # After the first update, so that a change that does not work leaves the recipe of before.
                if update.step == begun + 1:
                    record_recipe(run)
                # Asked once, of all ranks: a signal while `after` works waits for the next update.
                signal = processes.agreement.signalled(stop.signal)
                after(run, update, signal is not None)
                processes.watch.step(update.step)
                if signal is not None:
                    break
        run.saved(run.saver.finish())
        # A signal in the last update is no stop: the run has all its updates, and `finish` asks for signals by itself.
        code = finish(run, stop) if signal is None or run.state.step == run.every.total else stopped(run, signal)
        with processes.watch.doing("finishing"):
            # Launchers end the others soon after the first one that leaves. Over the group: the place where the ranks
            # met may be gone with the launcher.
            return max(processes.agreement.gather(code))


def record_recipe(run: Run) -> None:
    """Writes the recipe that the run has gone on with."""
    if run.processes.leads:
        resume.record_recipe(run.config, run.folder, run.sizes)


def check_mesh(loaded: Loaded, storage: RunStorage, own: World) -> None:
    """UserError for a mesh or a batch that does not fit the processes, before they meet or write anything."""
    try:
        resume.foreseen_sizes(loaded, storage, loaded.config.mesh.resolved(own.size, own.nodes))
    except UserError as error:
        # One message a machine: its first process says it.
        if own.local_rank:
            raise ReportedElsewhere(error) from None
        raise


def was_finished(run: Run) -> bool:
    """True if this run was finished before."""
    return (run.folder.read_status() or {}).get("state") == "finished"


def batches(run: Run, stack: ExitStack) -> Iterator[list[Batch]]:
    """The micro-batches of each update on the device, from the state's position in the plan."""
    updates = stack.enter_context(run.loading.updates(run.state.slots))
    return ([device.on(run.parts.device, batch) for batch in update] for update in updates)


def profiled(run: Run, updates: Iterator[loop.Update]) -> Generator[loop.Update]:
    """The same updates; those that the recipe names are recorded."""
    settings, rank = run.config.profiler, run.processes.world.rank
    steps = settings.steps if rank == 0 or settings.ranks == "all" else None

    def write(found: profiler.Profile, first: int, last: int) -> None:
        trace, table = profiler.files(run.folder.profile, first, last, rank)
        with run.tolerant("writing the profile"):
            profiler.save(found, trace, table)
            run.say([f"profile of updates {first} to {last}: {trace}, {table.name}"])

    if steps is not None and run.state.step >= steps[1]:
        run.say([f"profiler.steps: nothing is recorded, as update {steps[1]} is made already"])
    return profiler.recorded(updates, steps or [1, 0], run.state.step, run.parts.device, write)


def after(run: Run, update: loop.Update, stopping: bool) -> None:
    """Writes numbers, validates and saves after an update, each at its interval and at the end."""
    run.terminal.update(update.step, run.state.samples, (update.values or {}).get("learning/loss"))
    if update.values is not None:
        run.loading.share(run.state.sharding.gather)
        # Before validation and images: a kill in one of these must not cost the line of the step.
        run.log({**update.values, **hardware_numbers(run, update.values["perf/step_time_seconds"])})
    last = update.step == run.every.total
    if run.every.validation is not None and (last or run.every.validation(update.step)):
        validate(run)
    if stopping or last or (run.every.checkpoint is not None and run.every.checkpoint(update.step)):
        save(run)
    elif run.saver.finished():
        run.saved(run.saver.settle())


def hardware_numbers(run: Run, step_seconds: float) -> dict[str, float]:
    """Arithmetic and memory of this device: the trained net's forward and backward passes, counted."""
    tflops = run.flops_per_sample * run.sizes.whole / run.processes.world.size / 1e12
    if run.parts.device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(run.parts.device)
    else:
        peak_bytes = system.peak_resident_bytes()
    return {
        "perf/per_device_tflops": tflops,
        "perf/per_device_tflops_per_sec": tflops / step_seconds,
        "memory/peak_bytes": peak_bytes,
    }


def validate(run: Run) -> None:
    """Loss on the first held-out samples at fixed noise levels, by the averaged weights."""
    settings, sharding = run.config.validation, run.state.sharding
    with busy(run, "validating", advice.of_validation), evaluating(run.state):
        made = loader.fixed_batches(
            run.validated,
            settings.num_samples,
            run.loading.micro_size,
            sharding.rank,
            sharding.ranks,
            run.parts.images,
            run.parts.columns,
            run.parts.is_ragged,
        )
        values = validation.validation_losses(named(run, made), run.parts.losses_at, settings.num_levels, sharding)
    if values:
        run.log(values)


def named(run: Run, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches; shows a message, once, for each held-out sample that cannot be decoded."""
    for batch in batches:
        broken = [name for name, valid in zip(batch.names, batch.valid_B.tolist(), strict=True) if not valid]
        run.say([f"held-out sample that cannot be decoded, not in the validation loss: {name}" for name in broken])
        yield batch


def save(run: Run) -> None:
    """Begins a checkpoint, then publishes its state."""
    run.loading.share(run.state.sharding.gather)
    documents = {
        "state": run.state.document(),
        "pace": run.pace.document(),
        "loading": run.loading.document(),
        "config": run.config.model_dump(mode="json"),
        "code": {"version": __version__},
        "base": run.base,
    }
    with busy(run, "saving", advice.of_saving):
        name, files = f"step-{run.state.step:08d}", run.parts.family.files()
        run.saved(run.saver.save(name, state_io.groups(run.state), documents, files))
    # After the save has begun: images and export are functions of the same state, so a restart can make them after a
    # kill, and an export that fails costs no checkpoint.
    publish(run)


def publish_if_missing(run: Run) -> None:
    """After a restart: publishes a state that was killed right after its save."""

    def published() -> int:
        try:
            return int(documents.read_object(run.folder.data).get("step", 0))
        except (FileNotFoundError, ValueError, TypeError):  # of a damaged file nothing is known: all is written again
            return 0

    if run.state.step and run.processes.agreement.run_on_rank0(published) != run.state.step:
        publish(run, again=True)


def publish(run: Run, again: bool = False) -> None:
    """Makes the sample images, the export, counts of skipped samples and the report of the state that was just saved;
    `again`: some of them may have been made before.

    An error of the disk does not end the run: all are made again at the next save.
    """
    draws = run.config.sampling.num_images and generates(run)
    whole_model = any(own.whole for own in run.parts.attached.trainables.values())
    exports = run.config.checkpoint.export and whole_model  # an adapter's files need no encoder
    needed = encoders.present(run.parts.family) if exports or draws else nullcontext()
    with evaluating(run.state), needed:
        if draws:
            with busy(run, "generating images"), run.tolerant("generating images"):
                write_samples(run, again)
        if run.config.checkpoint.export:
            with busy(run, "exporting", advice.of_exporting):
                # Outside `tolerant`: all processes take part, and an error of one must not leave the others waiting.
                attached = whole(run)
                if run.processes.leads:
                    with run.tolerant("exporting"):
                        export(run, attached)
    with run.tolerant("reporting"):
        if run.processes.leads:
            write_json_atomically(run.folder.data, {"step": run.state.step, **run.loading.report()})
            # Results of `daguerre evaluate` come from other processes: a save is when this one looks.
            trackers.send_evaluations(run.sinks, run.folder, run.state.samples)
        run.status("running")
        run.page()


def export(run: Run, attached: Attached) -> None:
    """Writes `pipeline/`, and of adapters that add to the model `adapter/`."""
    epoch = float(run.pace.position(run.state.step, "epochs")) if run.dataset.count else None
    image = samples.first(run.folder.samples_of(run.state.step)) if run.config.sampling.num_images else None
    tags = run.tags if any(not own.whole for own in attached.trainables.values()) else {}
    facts = about.of(run.config, run.parts.family, run.base, run.state.step, epoch, image, tags)
    for folder, whole in ((run.folder.pipeline, True), (run.folder.adapter, False)):
        run.say(attached.export(folder, run.parts.objective, run.config.sampling, facts, whole))


@contextmanager
def busy(run: Run, what: str, on_out_of_memory: Callable[[advice.Names], str] | None = None) -> Iterator[None]:
    """Shows what the run is doing, to the person and to the watchdog, with advice if memory runs out."""
    with ExitStack() as stack:
        stack.enter_context(run.terminal.busy(what))
        stack.enter_context(run.processes.watch.doing(what))
        if on_out_of_memory is not None:
            stack.enter_context(oom.explained(what, lambda: on_out_of_memory(run.saver)))
        yield


def generates(run: Run) -> bool:
    """True if this process takes part in generation: all do if they hold the networks together."""
    return run.parts.family.generates and (run.processes.leads or run.state.sharding.splits)


def whole(run: Run) -> Attached:
    """The adapters with whole present weights, on rank 0; sharded ones in the host's memory. All processes call it."""
    if not run.state.sharding.splits:
        return run.parts.attached
    return run.gathered.take(run.state.sharding, run.parts.attached)


def write_samples(run: Run, again: bool = False) -> None:
    """Generates the recipe's prompts, or captions of held-out samples, from fixed seeds; sinks get each once."""

    def show(image: generate.GeneratedImage) -> None:
        one = image.request
        text = trackers.image_text(one.prompt.text, one.seed)
        for sink in run.sinks:
            sink.show(run.state.step, trackers.image_name(one.number), image.pixels_HWC, text)

    each = sample_requests(run)
    folder = run.folder.samples_of(run.state.step) if run.processes.leads else None
    shown = again and folder is not None and (folder / samples.LISTING).is_file()
    samples.write(run.parts, run.config, each, folder, {"step": run.state.step}, (lambda _: None) if shown else show)


def sample_requests(run: Run) -> list[generate.ImageRequest]:
    """The sample images of the recipe, with stored or computed control images where adapters read some, with the
    reference images of samples, and with the samples themselves for a family that reads those."""
    read, shown = run.parts.conditioning_images, {IMAGE} & {*run.parts.family.prompt_images}
    # A caption and the image beside it are of one sample; captions alone may be of any.
    each = samples.requests(run.config, partial(captions, run, pairs=bool(read or shown)))
    if read or shown:
        made = loader.fixed_batches(shown_samples(run), len(each), lambda _: 1, images=read)
        each = samples.with_images(run.parts.family, each, made, {*read, *shown})
    return each


def write_strengths(run: Run) -> None:
    """Generates the first sample images once more, with the adapters at each of their strengths."""
    attached = run.parts.attached
    with ExitStack() as stack:
        stack.enter_context(busy(run, "generating images"))
        stack.enter_context(run.tolerant("generating images"))
        stack.enter_context(evaluating(run.state))
        stack.enter_context(encoders.present(run.parts.family))
        # Only at the end: it costs as many images again as there are strengths.
        for strength in attached.strengths:
            folder = run.folder.samples / samples.STRENGTHS / f"{strength:g}" if run.processes.leads else None
            provenance = {"step": run.state.step, "strength": strength}
            with attached.at(strength):
                samples.write(run.parts, run.config, sample_requests(run)[: samples.COMPARED], folder, provenance)


def captions(run: Run, count: int, pairs: bool) -> list[str]:
    """Captions of the first held-out samples, or of trained ones if none are held out; as they come if images go with
    them (`pairs`), else each once, and where that gives too few, those of trained samples, too."""
    texts = loader.fixed_captions(shown_samples(run), count)
    if pairs or len({*texts}) == count:
        return texts
    return list(dict.fromkeys([*texts, *loader.fixed_captions(run.dataset, count)]))[:count]


def shown_samples(run: Run) -> Dataset:
    """The held-out samples; trained ones if none are held out."""
    return run.held_out if run.held_out.size != 0 else run.dataset


def stopped(run: Run, signal: Signals) -> int:
    """Records that a run was stopped by a signal; its state is saved. Returns the exit code."""
    run.status("saved", reason=f"stopped by {signal.name}")
    run.page()
    run.say([f"stopped by {signal.name} and saved at step {run.state.step:,}; run the same command to continue"])
    # As shells report a process that a signal has ended.
    return 128 + signal


def finish(run: Run, stop: StopSignals) -> int:
    """Evaluates and reports; returns the exit code. All is saved, so that a signal ends it."""
    signals: list[Signals] = []

    def stopping() -> bool:
        # If all processes generate, they stop at the same image; if one does, the others wait for it.
        signal = run.processes.agreement.signalled(stop.signal) if run.state.sharding.splits else stop.signal
        signals.extend([signal] if signal is not None else [])
        return signal is not None

    if run.config.sampling.num_images and generates(run):
        write_strengths(run)
    measured, stored = run.dataset.measured, None in run.parts.attached.images.values()
    if measured is not None and generates(run) and not stored:  # a metric has no stored control images
        try:
            with run.processes.watch.doing("evaluating"):
                evaluate(run, measured, stopping)
        except generate.Stopped:
            return stopped(run, signals[0])
    run.status("finished")
    run.page()
    run.say([f"finished: {counted(run.state.step, 'update')}. {where(run)}"])
    return 0


def evaluate(run: Run, measured: Member, stop: Callable[[], bool]) -> None:
    """Measures the metric of a source on images of its held-out prompts, by the averaged weights."""
    control = run.parts.attached.images
    shown = {IMAGE} & {*run.parts.family.prompt_images}

    def generated(requests: Sequence[ImageRequest]) -> Iterator[np.ndarray]:
        each = partial(generate.generate, run.parts, run.config.sampling, stop=stop)
        return (image.pixels_HWC for image in generate.in_order(each, requests))

    def draw(texts: Sequence[str], references: Sequence[np.ndarray] = (), /) -> Iterator[np.ndarray]:
        return generated(measured_images.of_metric(run.config, texts, references))

    def redraw(texts: Sequence[str], originals: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        pairs = zip(measured_images.of_metric(run.config, texts), originals, strict=True)
        images = [
            (one, samples.control_images(control, pixels, one.number) | dict.fromkeys(shown, pixels))
            for one, pixels in pairs
        ]
        return generated([replace(one, prompt=replace(one.prompt, images=own)) for one, own in images])

    what = f"evaluating ({measured.source.metric})"
    with run.terminal.busy(what), evaluating(run.state), encoders.present(run.parts.family):
        metric = plugins.find("metrics", str(measured.source.metric))
        inputs = DrawnInputs(measured.settings, draw, redraw if control or shown else None)
        results = metric.evaluate(metric.Settings(), inputs)
    if not run.processes.leads:
        return
    documents = {table: {"step": run.state.step, **result.document()} for table, result in results.items()}
    write_json_atomically(run.folder.evaluation, documents)
    values = {
        f"evaluation/{table}/{name}": share
        for table, result in results.items()
        for name, share in result.values().items()
    }
    known = [line for line in read_metrics(run.folder.metrics) if line["step"] == run.state.step]
    if not any(values.keys() <= line.keys() for line in known):
        run.log(values)
    run.say([line for table, result in results.items() for line in result.table(table)])


def where(run: Run) -> str:
    """The places of the results that there are, in words."""
    places = {"images": "samples", "pipeline": "pipeline", "adapter": "adapter", "report": "report.html"}
    shown = local_copy.display_name(run.folder.path)
    written = {what: name for what, name in places.items() if (run.folder.path / name).exists()}
    return ", ".join(f"{what}: {shown}/{name}" for what, name in written.items())
