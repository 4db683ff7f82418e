"""A training run, in the order in which things happen. What is computed is the loop's; what is kept is decided here.

Order of a save: the numbers of the step, the checkpoint (only then is it saved), then what follows from it: export,
pictures, report. A run that is killed in between makes on restart what is missing.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from signal import Signals
from typing import Any

import torch

from daguerre import __version__, plugins
from daguerre.adapters.adapter import Attached
from daguerre.checkpoint.atomic import write_json_atomically
from daguerre.checkpoint.signals import StopSignals
from daguerre.config.config import Loaded
from daguerre.data.loading import loader
from daguerre.distributed.launch import environment
from daguerre.distributed.launch.environment import World
from daguerre.errors import SaidElsewhere, UserError
from daguerre.generation import generate
from daguerre.memory import advice
from daguerre.remote import local_copy
from daguerre.run import resume, samples, state_io
from daguerre.run.distribute import led, together
from daguerre.run.setup import Run, loop_plan, start
from daguerre.run.storage import Home
from daguerre.tracking.sinks import read_metrics
from daguerre.training import device, loop, oom, validation
from daguerre.training.state import evaluating
from daguerre.types import Batch, LossTerms


def train(loaded: Loaded, home: Home) -> int:
    """Trains until the recipe's duration, a signal or an error; returns the exit code. For all processes of a run."""
    config = loaded.config
    refuse_mesh(loaded, home, environment.read())
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignals(launched=environment.read().launcher != "none"))
        processes = stack.enter_context(together(config, home, stop))
        led(processes, lambda: stack.enter_context(home.hold()))
        run = start(loaded, home, stack, stop, processes)
        if run.state.step >= run.every.total and led(processes, lambda: was_finished(run)):
            run.say([f"this run is finished: {run.state.step:,} updates. {where(run)}"])
            return 0
        run.status("running")
        publish_if_missing(run)
        updates = loop.train(run.state, batches(run, stack), run.parts.loss, loop_plan(run), run.parts.autocast)
        signal = None
        with run.enough_memory():
            for update in updates:
                # Asked once, of all ranks: a signal while `after` works waits for the next update.
                signal = processes.agreement.signalled(stop.signal)
                after(run, update, signal is not None)
                processes.watch.step(update.step)
                if signal is not None:
                    break
        run.saved(run.saver.finish())
        code = finish(run, stop) if signal is None or run.state.step == run.every.total else stopped(run, signal)
        with processes.watch.doing("finishing"):
            # Launchers end the others soon after the first one that leaves. Over the group: the place where the ranks
            # met may be gone with the launcher.
            return max(processes.agreement.gather(code))


def refuse_mesh(loaded: Loaded, home: Home, own: World) -> None:
    """UserError for a mesh or a batch that does not fit the processes: before they meet, and before anything is
    written."""
    try:
        resume.foreseen_sizes(loaded, home, loaded.config.mesh.resolved(own.size, own.nodes))
    except UserError as error:
        if own.local_rank:
            raise SaidElsewhere(error) from None
        raise


def was_finished(run: Run) -> bool:
    """Whether this run has come to its end before."""
    return (run.folder.read_status() or {}).get("state") == "finished"


def batches(run: Run, stack: ExitStack) -> Iterator[list[Batch]]:
    """The micro-batches of each update on the device, from the state's position in the plan, their numbers drawn
    ahead."""
    updates = stack.enter_context(run.loading.updates(run.state.slots))
    return ([device.on(run.parts.device, batch) for batch in update] for update in updates)


def after(run: Run, update: loop.Update, stopping: bool) -> None:
    """What happens after an update: numbers, validation and saving, each at its interval and at the end."""
    run.terminal.update(update.step, run.state.samples, (update.values or {}).get("learning/loss"))
    if update.values is not None:
        run.loading.share(run.state.sharding.gather)
        run.log({**update.values, **hardware_numbers(run, update.values["perf/step_time_seconds"])})
    last = update.step == run.every.total
    if run.every.validation is not None and (last or update.step % run.every.validation == 0):
        validate(run)
    if stopping or last or (run.every.checkpoint is not None and update.step % run.every.checkpoint == 0):
        save(run)
    elif run.saver.finished():
        run.saved(run.saver.settle())


def hardware_numbers(run: Run, step_seconds: float) -> dict[str, float]:
    """Arithmetic and memory of this device: the trained net's forward and backward passes, counted."""
    tflops = run.flops_per_sample * run.sizes.whole / run.processes.world.size / 1e12
    if run.parts.device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(run.parts.device)
    else:
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "perf/per_device_tflops": tflops,
        "perf/per_device_tflops_per_sec": tflops / step_seconds,
        "memory/peak_bytes": peak_bytes,
    }


def validate(run: Run) -> None:
    """Loss on the first held-out samples at fixed noise levels, by the averaged weights."""

    def loss_at(batch: Batch, quantile: float) -> LossTerms:
        draws = {name: value.to(run.parts.device) for name, value in run.parts.draws(batch, quantile).items()}
        with run.parts.autocast():
            return run.parts.loss(run.parts.net, replace(batch, draws=draws))

    settings, sharding = run.config.validation, run.state.sharding
    told = oom.explained("validating", lambda: advice.of_validation(run.saver))
    with run.terminal.busy("validating"), run.processes.watch.doing("validating"), evaluating(run.state), told:
        made = loader.fixed_batches(
            run.held_out, settings.num_samples, run.loading.micro_size, sharding.rank, sharding.ranks, run.parts.images
        )
        values = validation.validation_losses(
            device.moved(named(run, made), run.parts.device), loss_at, settings.num_levels, sharding
        )
    if values:
        run.log(values)


def named(run: Run, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches; held-out samples of them that cannot be decoded are said, once."""
    for batch in batches:
        broken = [name for name, valid in zip(batch.names, batch.valid_B.tolist(), strict=True) if not valid]
        run.say([f"held-out sample that cannot be decoded, left out of the validation loss: {name}" for name in broken])
        yield batch


def save(run: Run) -> None:
    """Begins a checkpoint, then makes what follows from it."""
    run.loading.share(run.state.sharding.gather)
    documents = {
        "state": run.state.document(),
        "loading": run.loading.document(),
        "config": run.config.model_dump(mode="json"),
        "code": {"version": __version__},
        "base": run.base,
    }
    told = oom.explained("saving", lambda: advice.of_saving(run.saver))
    with run.terminal.busy("saving"), run.processes.watch.doing("saving"), told:
        name, files = f"step-{run.state.step:08d}", run.parts.family.files()
        run.saved(run.saver.save(name, state_io.groups(run.state), documents, files))
    publish(run)


def publish_if_missing(run: Run) -> None:
    """After a restart: makes what a kill right after a save has left out."""

    def published() -> int:
        known = json.loads(run.folder.data.read_bytes()) if run.folder.data.exists() else {}
        return int(known.get("step", 0))

    if run.state.step and led(run.processes, published) != run.state.step:
        publish(run, again=True)


def publish(run: Run, again: bool = False) -> None:
    """Export, sample pictures, what was skipped and the report, of the state that was just saved; `again`: some of them
    may have been made before.

    A disk that refuses them does not end the run: all are made again at the next save.
    """
    watch, leads = run.processes.watch, run.processes.leads
    with evaluating(run.state):
        if run.config.checkpoint.export:
            told = oom.explained("exporting", lambda: advice.of_exporting(run.saver))
            with run.terminal.busy("exporting"), watch.doing("exporting"), told:
                attached = whole(run)
                if leads:
                    with run.tolerant("exporting"):
                        run.say(attached.export(run.folder.pipeline, run.parts.objective, run.config.sampling))
        if run.config.sampling.num_images and draws(run):
            with run.terminal.busy("drawing pictures"), watch.doing("drawing pictures"), run.tolerant("drawing"):
                draw_samples(run, again)
    with run.tolerant("reporting"):
        if leads:
            write_json_atomically(run.folder.data, {"step": run.state.step, **run.loading.report()})
        run.status("running")
        run.page()


def draws(run: Run) -> bool:
    """Whether this process takes part in drawing: all do where they hold the networks together."""
    return run.parts.family.generates and (run.processes.leads or run.state.sharding.splits)


def whole(run: Run) -> Attached:
    """What is trained, with the present weights, whole: on the process that leads. Where they are split, a copy in the
    host's memory takes them up one after the other; all processes call this."""
    if not run.state.sharding.splits:
        return run.parts.attached
    return run.whole.take(run.state.sharding, run.parts.attached)


def draw_samples(run: Run, again: bool = False) -> None:
    """The recipe's prompts, or captions of held-out samples, drawn from fixed seeds; TensorBoard gets each once."""

    def show(drawn: generate.Drawn) -> None:
        name, one = f"samples/{drawn.wanted.number:03d}", drawn.wanted
        for sink in run.sinks:
            sink.show(run.state.step, name, drawn.pixels_HWC, f"{one.prompt.text}\nseed {one.seed}")

    each = samples.wanted(run.config, lambda count: captions(run, count))
    folder = run.folder.samples / f"step-{run.state.step:08d}" if run.processes.leads else None
    shown = again and folder is not None and (folder / samples.LISTING).is_file()
    made_with = {"step": run.state.step}
    samples.write(run.parts, run.config, each, folder, made_with, (lambda drawn: None) if shown else show)


def captions(run: Run, count: int) -> list[str]:
    """Captions of the first held-out samples; of trained ones where none are held out."""
    dataset = run.held_out if run.held_out.size != 0 else run.dataset
    return loader.fixed_captions(dataset, count)


def stopped(run: Run, signal: Signals) -> int:
    """The last words of a run that was told to stop; its state is saved."""
    run.status("saved", reason=f"stopped by {signal.name}")
    run.page()
    run.say([f"stopped by {signal.name} and saved at step {run.state.step:,}; the same command goes on from there"])
    return 128 + signal


def finish(run: Run, stop: StopSignals) -> int:
    """Evaluation, the report and where everything is; the exit code. All is saved, so that a signal ends it."""
    told: list[Signals] = []

    def stopping() -> bool:
        # Where all processes draw, they stop at the same picture; where one does, the others wait for it.
        signal = run.processes.agreement.signalled(stop.signal) if run.state.sharding.splits else stop.signal
        told.extend([signal] if signal is not None else [])
        return signal is not None

    if run.dataset.metric is not None and draws(run):
        try:
            with run.processes.watch.doing("evaluating"):
                evaluate(run, run.dataset.metric, stopping)
        except generate.Stopped:
            return stopped(run, told[0])
    run.status("finished")
    run.page()
    run.say([f"finished: {run.state.step:,} updates. {where(run)}"])
    return 0


def evaluate(run: Run, metric: str, stop: Callable[[], bool]) -> None:
    """What the source's metric reads off pictures of held-out prompts, by the averaged weights."""

    def draw(prompts: Sequence[str]) -> Iterator[Any]:
        side, seeds = run.config.data.resolution, list(range(len(prompts)))
        return generate.draw_pictures(run.parts, side, run.config.sampling, prompts, seeds, stop)

    with run.terminal.busy(f"evaluating ({metric})"), evaluating(run.state):
        (source,) = run.config.data.sources.values()
        found = plugins.find("metrics", metric).evaluate(source, draw)
    if not run.processes.leads:
        return
    write_json_atomically(run.folder.evaluation, {metric: {"step": run.state.step, **found.document()}})
    values = {f"evaluation/{metric}/{name}": share for name, share in found.shares().items()}
    known = [line for line in read_metrics(run.folder.metrics) if line["step"] == run.state.step]
    if not any(values.keys() <= line.keys() for line in known):
        run.log(values)
    run.say(found.table())


def where(run: Run) -> str:
    """Where a person finds what was made."""
    place = local_copy.shown(run.folder.path)
    return f"pictures: {place}/samples, pipeline: {place}/pipeline, report: {place}/report.html"
