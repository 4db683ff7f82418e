"""A trial of a training: its first updates are made in a process of their own and measured; nothing of it is kept."""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from daguerre import documents
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.errors import UserError
from daguerre.queue.queue import bound
from daguerre.tracking.sinks import read_metrics

UPDATES = 10
"""How many are made."""
_WARM = 2
"""The first of them, in which everything starts, do not count."""
_LOOK_SECONDS = 0.3
_GIVEN = ("logging.every=1 step", "logging.trackers=[]", "checkpoint.every=null", "sampling.num_images=0")


@dataclass(frozen=True)
class Trial:
    """Measured figures of a training on this machine."""

    seconds_per_update: float
    peak_bytes: int
    """Most memory of the device, or of the process on a CPU."""
    total_steps: int | None
    """Updates of the whole run, as it counted them itself."""

    @property
    def hours(self) -> float | None:
        return None if self.total_steps is None else self.total_steps * self.seconds_per_update / 3600


def tried(
    words: Sequence[str],
    folder: Path,
    roots: Sequence[str] = (),
    stopping: Callable[[], bool] = lambda: False,
    program: Sequence[str] = (sys.executable, "-m", "daguerre"),
    seconds: float = 1800.0,
) -> Trial:
    """Makes the first updates of `daguerre train` with these words, in `folder`, and ends it. UserError for what it
    refuses, and for one that takes longer than so many seconds."""
    # Hidden, so that no list shows it; where runs are written, as its recipe may write nowhere else.
    with tempfile.TemporaryDirectory(prefix=".trial-", dir=folder, ignore_cleanup_errors=True) as place:
        run, log = RunFolder(Path(place) / "trial"), Path(place) / "log"
        given = [*words, f"output_dir={place}", "run_name=trial", *_GIVEN]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*program, "train", *given],
                cwd=folder,
                env={**os.environ, **bound(roots)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return _measured(process, run, log, stopping, time.monotonic() + seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # workers of its loader, too; what it would save is not wanted
            process.wait()


def _measured(
    process: subprocess.Popen[bytes], run: RunFolder, log: Path, stopping: Callable[[], bool], deadline: float
) -> Trial:
    while True:
        ended = process.poll() is not None
        rows = [row for row in read_metrics(run.metrics) if "perf/step_time_seconds" in row]
        if len(rows) >= UPDATES or (ended and len(rows) > _WARM):
            break
        if ended:
            said = log.read_text("utf-8", "replace").strip().removeprefix("daguerre: ")
            raise UserError(said or f"`daguerre train` ended with exit code {process.returncode}")
        if stopping() or time.monotonic() > deadline:
            raise UserError(f"the trial was given up after {len(rows)} of {UPDATES} updates", code="failed")
        time.sleep(_LOOK_SECONDS)
    total = (documents.read_object(run.status) if run.status.exists() else {}).get("total_steps")
    return Trial(
        statistics.median(row["perf/step_time_seconds"] for row in rows[_WARM:]),
        int(max(row.get("memory/peak_bytes", 0) for row in rows)),
        total if isinstance(total, int) else None,
    )
