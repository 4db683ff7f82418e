"""The results of a run: checkpoints, losses on held-out samples, sample images, exports, reports, evaluations.

Each is made of the present state and changes none of it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from signal import Signals

import numpy as np

from daguerre import __version__, documents, plugins
from daguerre.adapters.adapter import Attached
from daguerre.assembly import about
from daguerre.checkpoint.atomic import write_json_atomically
from daguerre.data.dataset import Dataset, Member
from daguerre.data.loading import loader
from daguerre.errors import UserError
from daguerre.evaluation import images as measured_images
from daguerre.evaluation.formulas.outcome import Features
from daguerre.evaluation.metric import DrawnInputs
from daguerre.evaluation.outcome import features, outcome, prompts
from daguerre.evaluation.outcome.features import ModelFeatures
from daguerre.evaluation.outcome.outcome import Cell
from daguerre.generation import generate
from daguerre.generation.generate import ImageRequest
from daguerre.memory import advice
from daguerre.models import encoders
from daguerre.remote import local_copy
from daguerre.report import outcome as report_outcome
from daguerre.run import samples, state_io, trackers
from daguerre.run.setup import Run
from daguerre.tracking.sinks import read_metrics
from daguerre.training import oom, validation
from daguerre.training.state import evaluating
from daguerre.types import IMAGE, Batch


def validate(run: Run) -> None:
    """Loss on the first held-out samples at fixed noise levels, by the averaged weights, and by those that are trained
    if that is asked for."""
    with busy(run, "validating", advice.of_validation):
        with evaluating(run.state):
            values = _held_out_losses(run)
        if values and run.config.validation.raw_weights:
            with evaluating(run.state, averaged=False):
                values |= {"validation/loss_raw": _held_out_losses(run)["validation/loss"]}
    if values:
        run.log(values)


def _held_out_losses(run: Run) -> dict[str, float]:
    settings, sharding = run.config.validation, run.state.sharding
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
    return validation.validation_losses(named(run, made), run.parts.losses_at, settings.num_levels, sharding)


def named(run: Run, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches; shows a message, once, for each held-out sample that cannot be decoded."""
    for batch in batches:
        broken = [name for name, valid in zip(batch.names, batch.valid_B.tolist(), strict=True) if not valid]
        run.say([f"held-out sample that cannot be decoded, not in the validation loss: {name}" for name in broken])
        yield batch


def checkpoint_name(run: Run) -> str:
    """Name of a checkpoint of the present state."""
    return f"step-{run.state.step:08d}"


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
        name, files = checkpoint_name(run), run.parts.family.files()
        run.saved(run.saver.save(name, state_io.groups(run.state), documents, files))
    # After the save has begun: images and export are functions of the same state, so a restart can make them after a
    # kill, and an export that fails costs no checkpoint.
    publish(run)


def save_if_missing(run: Run) -> None:
    """Saves, unless the newest save is of the present state and did not fail."""
    name = checkpoint_name(run)
    if run.saver.latest == name:
        run.saved(run.saver.settle())  # in flight, only some ranks may have seen that it has failed
    if run.saver.latest != name:
        save(run)


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

    An error of the disk does not end the run: all are made again at the next save. A signal ends the sample images: a
    restart makes them.
    """
    draws = run.config.sampling.num_images and generates(run)
    whole_model = any(own.whole for own in run.parts.attached.trainables.values())
    exports = run.config.checkpoint.export and whole_model  # an adapter's files need no encoder
    needed = encoders.present(run.parts.family, exports=exports) if exports or draws else nullcontext()
    drawn = True
    with evaluating(run.state), needed:
        if draws:
            with run.tolerant("generating images"):
                drawn = write_samples(run, again)
        if run.config.checkpoint.export:
            with busy(run, "exporting", advice.of_exporting):
                # Outside `tolerant`: all processes take part, and an error of one must not leave the others waiting.
                attached = whole(run)
                if run.processes.leads:
                    with run.tolerant("exporting"):
                        export(run, attached)
    with run.tolerant("reporting"):
        if run.processes.leads:
            write_json_atomically(run.folder.data, {"step": run.state.step if drawn else 0, **run.loading.report()})
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
def busy(
    run: Run, what: str, on_out_of_memory: Callable[[advice.Names], str] | None = None, total: int = 0
) -> Iterator[Callable[[], None]]:
    """Shows what the run is doing, to the person and to the watchdog, with advice if memory runs out. Each call of what
    it yields counts one of `total` images."""
    with ExitStack() as stack:
        count = stack.enter_context(run.terminal.busy(what, total))
        stack.enter_context(run.processes.watch.doing(what))
        if on_out_of_memory is not None:
            stack.enter_context(oom.explained(what, lambda: on_out_of_memory(run.saver)))
        yield count


def generates(run: Run) -> bool:
    """True if this process takes part in generation: all do if they hold the networks together."""
    return run.parts.family.generates and (run.processes.leads or run.state.sharding.splits)


def whole(run: Run) -> Attached:
    """The adapters with whole present weights, on rank 0; sharded ones in the host's memory. All processes call it."""
    if not run.state.sharding.splits:
        return run.parts.attached
    return run.gathered.take(run.state.sharding, run.parts.attached)


def write_samples(run: Run, again: bool = False) -> bool:
    """Generates the recipe's prompts, or captions of held-out samples, from fixed seeds; sinks get each once. False if
    a signal ended it."""

    def show(image: generate.GeneratedImage) -> None:
        count()
        if shown:
            return
        one = image.request
        text = trackers.image_text(one.prompt.text, one.seed)
        for sink in run.sinks:
            sink.show(run.state.step, trackers.image_name(one.number), image.pixels_HWC, text)

    folder = run.folder.samples_of(run.state.step) if run.processes.leads else None
    shown = again and folder is not None and (folder / samples.LISTING).is_file()
    total, provenance = run.config.sampling.num_images, {"step": run.state.step}
    with busy(run, "generating sample images", total=total) as count, suppress(generate.Stopped):
        samples.write(run.parts, run.config, sample_requests(run), folder, provenance, show, Stopping(run))
        return True
    return False


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


def images_at_end(run: Run) -> int:
    """Counts the images that are drawn after the last update: at its save, in `write_strengths` and in `compare`."""
    count = run.config.sampling.num_images if generates(run) else 0
    return count + len(run.parts.attached.strengths) * min(samples.COMPARED, count) + 6 * _compared(run)


def write_strengths(run: Run, stop: Callable[[], bool]) -> None:
    """Generates the first sample images once more, with the adapters at each of their strengths. generate.Stopped."""
    attached = run.parts.attached
    total = len(attached.strengths) * min(samples.COMPARED, run.config.sampling.num_images)
    with ExitStack() as stack:
        count = stack.enter_context(busy(run, "generating sample images at each strength", total=total))
        stack.enter_context(run.tolerant("generating images"))
        stack.enter_context(evaluating(run.state))
        stack.enter_context(encoders.present(run.parts.family))
        each = sample_requests(run)[: samples.COMPARED]
        # Only at the end: it costs as many images again as there are strengths.
        for strength in attached.strengths:
            folder = run.folder.samples / samples.STRENGTHS / f"{strength:g}" if run.processes.leads else None
            provenance = {"step": run.state.step, "strength": strength}
            with attached.at(strength):
                samples.write(run.parts, run.config, each, folder, provenance, lambda _: count(), stop)


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


@dataclass
class Stopping:
    """Asks for signals to stop before each batch of images, and keeps the one that came."""

    run: Run
    signal: Signals | None = None

    def __call__(self) -> bool:
        # If all processes generate, they stop at the same image; if one does, the others wait for it.
        agreement, split = self.run.processes.agreement, self.run.state.sharding.splits
        own = self.run.stop.signal
        self.signal = agreement.signalled(own) if split else own
        return self.signal is not None


def measured(run: Run) -> Member | None:
    """The source whose metric can be measured in this run, if there is one."""
    # A metric has no stored control images.
    return None if None in run.parts.attached.images.values() else run.dataset.measured


def measure(run: Run, stop: Callable[[], bool]) -> None:
    """Measures the metric of the source, if it has one. generate.Stopped."""
    source = measured(run)
    if source is not None and generates(run):
        with run.processes.watch.doing("evaluating"):
            evaluate(run, source, stop)


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


def compare(run: Run, stop: Callable[[], bool]) -> None:
    """Compares the averaged weights with the base, and says what came of them; nothing where the recipe asks for no
    such images, or the adapters cannot be switched off. generate.Stopped.

    An error that is not ours costs the comparison alone: the run is at its end, and all of it is saved.
    """
    count = _compared(run)
    folder = run.folder.evaluations / f"compare-step-{run.state.step:08d}"
    if not count or (folder / outcome.NAME).is_file():  # after a restart
        return
    try:
        outcome.check(run.parts)
        features.check(run.parts)
        lists = prompts.lists(run.config, count)
        run.say([
            f"comparing with the base: {6 * count} images; validation.compared_images=0 leaves that out, and `daguerre "
            "compare` makes it later"
        ])  # fmt: skip
        with ExitStack() as stack:
            counted = stack.enter_context(busy(run, "drawing for the comparison with the base", total=6 * count))
            stack.enter_context(evaluating(run.state))
            stack.enter_context(encoders.present(run.parts.family))
            own = ModelFeatures(lambda: run.parts)
            requests = lists.requests(run.config).values()
            base, trained = (_features_at(run, own, requests, strength, stop, counted) for strength in (0.0, 1.0))
            of_pictures = own.compute(lists.pictures.of(range(lists.pictures.total)))
    except UserError as error:
        run.say([f"not compared with the base: {error}"])
        return
    if not run.processes.leads:
        return
    cells = {Cell(run.state.step, 1.0): trained}
    more = {"run": local_copy.display_name(run.folder.path), "images": count}
    found = outcome.document(lists, own, of_pictures, base, cells, more)
    with run.tolerant("comparing with the base"):
        outcome.write(folder, found)
    run.say(report_outcome.lines(found))


def _compared(run: Run) -> int:
    """Images of each list by which the outcome is judged; 0 where it is not."""
    asked = run.config.sampling.num_images and 0.0 in run.parts.attached.strengths and generates(run)
    return run.config.validation.compared_images if asked else 0


def _features_at(
    run: Run,
    own: ModelFeatures,
    requests: Iterable[list[ImageRequest]],
    strength: float,
    stop: Callable[[], bool],
    count: Callable[[], None],
) -> Features:
    """Features of the images of each list at a strength; `count` is called for each image."""

    def each(listed: Iterable[ImageRequest]) -> Iterator[generate.GeneratedImage]:
        for image in generate.generate(run.parts, run.config.sampling, listed, stop):
            count()
            yield image

    with run.parts.attached.at(strength):
        drawn: list[list[np.ndarray]] = [
            [image.pixels_HWC for image in generate.in_order(each, listed)] for listed in requests
        ]
    return Features(*(own.compute(pixels) for pixels in drawn))
