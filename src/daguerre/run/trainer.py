"""A training run, in the order in which things happen: the loop computes; saves, samples and reports are here.

Order of a save: the numbers of the step, the checkpoint, then sample images, export and report. A run that is killed in
between makes on restart what is missing.
"""

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from functools import partial
from signal import Signals
from typing import Any

import torch

from daguerre import system, webhook
from daguerre.checkpoint.signals import StopSignals
from daguerre.config.config import Loaded
from daguerre.distributed.launch import environment
from daguerre.distributed.launch.environment import World
from daguerre.errors import ReportedElsewhere, UserError
from daguerre.formatting import counted, first_line, format_duration
from daguerre.generation import generate
from daguerre.remote import local_copy
from daguerre.run import results, resume
from daguerre.run.control import Control
from daguerre.run.distribute import process_group
from daguerre.run.schedule import loop_config
from daguerre.run.setup import Run, start
from daguerre.run.storage import RunStorage
from daguerre.training import device, loop, profiler
from daguerre.types import Batch


def train(loaded: Loaded, storage: RunStorage) -> int:
    """Trains until the recipe's duration, a signal or an error; returns the exit code. For all processes of a run."""
    config = loaded.config
    check_mesh(loaded, storage, environment.read())
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignals(launched=environment.read().launcher != "none"))
        processes = stack.enter_context(process_group(config, storage, stop))
        # Before anything is read: what a run finds in its folder must not change while it starts.
        processes.agreement.run_on_rank0(lambda: stack.enter_context(storage.hold()))
        if processes.world.size == 1:  # of several processes the watchdog tells it
            stack.push(partial(tell_failure, storage))
        run = start(loaded, storage, stack, stop, processes)
        stack.callback(run.saver.wait)  # an error does not cut off a save, nor let go of the folder before it has ended
        if run.state.step >= run.every.total and processes.agreement.run_on_rank0(lambda: was_finished(run)):
            run.say([f"this run is finished: {counted(run.state.step, 'update')}. {where(run)}"])
            return 0
        run.status("running")
        run.terminal.then = after_updates(run)
        results.publish_if_missing(run)
        plan = loop_config(run.config, run.sizes, run.pace)
        updates = loop.train(run.state, batches(run, stack), run.parts.loss, plan, run.parts.autocast)
        # Closed by name: a generator that is only dropped ends when it is collected, maybe without the others.
        updates = stack.enter_context(closing(profiled(run, updates)))
        control = stack.enter_context(Control(storage.inbox() if processes.leads else None, stop, processes))
        signal, begun = None, run.state.step
        if begun >= run.every.total:
            run.record_recipe()
        with run.enough_memory():
            for update in updates:
                # After the first update, so that a change that does not work leaves the recipe of before.
                if update.step == begun + 1:
                    run.record_recipe()
                signal = control.signalled()  # of any rank; all ask together
                if after(run, update, signal is not None):  # with a save: what came meanwhile ends the run here
                    signal = signal or control.signalled()
                run, signal = control.obey(run, signal)
                processes.watch.step(update.step)
                if signal is not None:
                    break
        run.saved(run.saver.finish())
        control.ended(run)
        # A signal in the last update is no stop: the run has all its updates, and `finish` asks for signals by itself.
        if signal is None or run.state.step == run.every.total:
            code = finish(run)
        else:
            code = stopped(run, signal, control.outcome(signal))
        with processes.watch.doing("finishing"):
            # Launchers end the others soon after the first one that leaves. Over the group: the place where the ranks
            # met may be gone with the launcher.
            return max(processes.agreement.gather(code))


def tell_failure(storage: RunStorage, kind: Any, error: BaseException | None, trace: Any) -> None:
    """Tells the user's webhook of an error that ends a run; for `ExitStack.push`."""
    if error is not None:
        status = storage.folder.read_status() or {}
        reason = first_line(error) or type(error).__name__
        if why := webhook.tell(storage.folder.path, "failed", reason, status.get("step"), status.get("total_steps")):
            print(f"daguerre: {why}", file=sys.stderr, flush=True)


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


def after(run: Run, update: loop.Update, stopping: bool) -> bool:
    """Writes numbers, validates and saves after an update, each at its interval and at the end. True if it saved."""
    run.terminal.update(update.step, run.state.samples, (update.values or {}).get("learning/loss"))
    if update.values is not None:
        run.loading.share(run.state.sharding.gather)
        # Before validation and images: a kill in one of these must not cost the line of the step.
        run.log({**update.values, **hardware_numbers(run, update.values["perf/step_time_seconds"])})
    last = update.step == run.every.total
    if run.every.validation is not None and (last or run.every.validation(update.step)):
        results.validate(run)
    saves = stopping or last or (run.every.checkpoint is not None and run.every.checkpoint(update.step))
    if saves:
        results.save(run)
    return saves


def after_updates(run: Run) -> Callable[[float | None], str]:
    """The text of what follows the last update, behind the time that is left, by the seconds that an image takes, once
    they are known."""
    images = results.images_at_end(run)
    evaluates = results.measured(run) is not None and results.generates(run)

    def told(seconds: float | None) -> str:
        took = "" if seconds is None else f" (about {format_duration(seconds * images)})"
        drawn = [f"{counted(images, 'image')} to draw{took}"] * bool(images)
        return " and ".join(drawn + ["the evaluation"] * evaluates)

    return told


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


def stopped(run: Run, signal: Signals, reason: str) -> int:
    """Records that a run was stopped; its state is saved. Returns the exit code."""
    run.status("saved", reason=reason)
    run.page()
    step, left = f"{run.state.step:,}", "run the same command to continue"
    if run.state.step == run.every.total:
        left = f"all updates are made, and the same command makes what is left of {after_updates(run)(None)}"
    run.say([f"{reason} and saved at step {step}; {left}"])
    # As shells report a process that a signal has ended.
    return 128 + signal


def finish(run: Run) -> int:
    """Evaluates and reports; returns the exit code. All is saved, so that a signal ends it."""
    stopping = results.Stopping(run)
    try:
        if run.config.sampling.num_images and results.generates(run):
            results.write_strengths(run, stopping)
        results.measure(run, stopping)
        results.compare(run, stopping)
    except generate.Stopped:
        assert stopping.signal is not None
        return stopped(run, stopping.signal, f"stopped by {stopping.signal.name}")
    run.status("finished")
    run.page()
    run.say([f"finished: {counted(run.state.step, 'update')}. {where(run)}"])
    return 0


def where(run: Run) -> str:
    """The places of the results that there are, in words."""
    places = {"images": "samples", "pipeline": "pipeline", "adapter": "adapter", "report": "report.html"}
    shown = local_copy.display_name(run.folder.path)
    written = {what: name for what, name in places.items() if (run.folder.path / name).exists()}
    return ", ".join(f"{what}: {shown}/{name}" for what, name in written.items())
