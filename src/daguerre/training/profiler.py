"""Records some updates of a run with torch.profiler: which operators run, when, on which device, and for how long."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from torch import device as torch_device
from torch.profiler import ProfilerActivity, profile, record_function

from daguerre.training.loop import Update

_ROWS = 40
"""Operators in the table."""

Profile = profile
Write = Callable[[Profile, int, int], None]
"""Gets the profiler, the first and the last update that it has recorded."""


def recorded(
    updates: Iterator[Update], steps: Sequence[int], done: int, device: torch_device, write: Write
) -> Generator[Update]:
    """The same updates, of which those from `steps[0]` to `steps[1]` are recorded, with all that the caller does in
    between; none if the first is after the last. `done` are made already. Where the updates end earlier, `write` gets
    what there is."""
    first, last = max(steps[0], done + 1), steps[1]
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    recording: Profile | None = None
    step = done

    def stop() -> None:
        nonlocal recording
        if recording is not None:
            recording.stop()
            finished, recording = recording, None
            write(finished, first, step)

    try:
        while True:
            if step + 1 == first <= last:
                recording = profile(activities=activities, record_shapes=True)
                recording.start()
            with record_function(f"update {step + 1}") if recording is not None else nullcontext():
                update = next(updates, None)
            if update is None:
                break
            step = update.step
            if step == last:
                stop()
            yield update
        stop()
    # The caller has left the loop, by a signal or an error: what was recorded until then is still written.
    except GeneratorExit:
        stop()
        raise


def files(folder: Path, first: int, last: int, rank: int) -> tuple[Path, Path]:
    """The trace and the table of some updates on a rank."""
    name = f"steps-{first}-{last}-rank{rank}"
    return folder / f"{name}.json.gz", folder / f"{name}.txt"


def save(found: Profile, trace: Path, table: Path) -> None:
    """Writes the trace in Chrome's format, and the operators that took most of the time as text. OSError."""
    trace.parent.mkdir(parents=True, exist_ok=True)
    by = "self_device_time_total" if ProfilerActivity.CUDA in found.activities else "self_cpu_time_total"
    text = found.key_averages().table(sort_by=by, row_limit=_ROWS, max_name_column_width=80)
    try:
        found.export_chrome_trace(str(trace))
        table.write_text(f"{text}\n", encoding="utf-8")
    except OSError:  # a part of a file would be taken for all of it
        trace.unlink(missing_ok=True)
        table.unlink(missing_ok=True)
        raise
