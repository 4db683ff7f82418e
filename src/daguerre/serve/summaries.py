"""Summaries of runs for a list, from the ends of their files: quick enough for a thousand runs at a time."""

import math
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from daguerre import documents
from daguerre.checkpoint.run_dir import Holder, RunFolder
from daguerre.errors import UserError
from daguerre.report.facts import WAITS
from daguerre.report.run import MOST_BYTES, holder, run_state, waits_since
from daguerre.serve.bounds import check_file
from daguerre.tracking.running_mean import RunningMean
from daguerre.tracking.sinks import parse_line

PAGE = "page.json"
"""The file in a run folder that holds what was written about the run on this page."""
_TAIL_BYTES = 12 << 10
_PICTURES = 3

Stamp = tuple[Holder | None, tuple[tuple[int, int, int], ...]]


@dataclass(frozen=True)
class Summary:
    """A run in a line."""

    name: str
    state: str
    """As `report.run.Run.state`."""
    reason: str
    since: str
    """From when on it waits for a person, as text; empty for one that does not."""
    step: int
    total: int | None
    loss: float | None
    """Running mean, as in the terminal."""
    speed: float | None
    """Samples a second."""
    left_seconds: float | None
    """Until the last update, without saves and samples; None unless it runs."""
    updated: float
    """Seconds since 1970 of the newest file."""
    picture_step: int | None
    """The save whose sample images are shown."""
    pictures: int
    """How many of them: the first of its listing."""
    note: str
    archived: bool


def summary(folder: Path, roots: tuple[Path, ...]) -> Summary:
    """The summary of a run folder; what is missing or damaged is left out."""
    paths = RunFolder(folder)
    status, page = _object(paths.status, roots), _object(folder / PAGE, roots)
    lines = _last_lines(paths.metrics, roots)
    last = lines[-1] if lines else {"step": 0}
    said = status.get("step")
    step = said if isinstance(said, int) and said >= last["step"] else last["step"]
    total = status.get("total_steps") if isinstance(status.get("total_steps"), int) else None
    state = run_state(folder, status)
    seconds = _latest(lines, "perf/step_time_seconds")
    runs = state == "running" and total is not None and seconds is not None
    picture_step, pictures = _pictures(paths, roots)
    return Summary(
        name=str(page.get("name") or folder.name),
        state=state,
        reason=str(status.get("reason") or ""),
        since=waits_since(status) if state in WAITS else "",
        step=step,
        total=total,
        loss=RunningMean(line.get("learning/loss", math.nan) for line in lines).value,
        speed=_latest(lines, "perf/samples_per_second"),
        left_seconds=max(0, (total or 0) - step) * (seconds or 0.0) if runs else None,
        updated=max(time / 1e9 for _, time, _ in stamp(folder)[1]),
        picture_step=picture_step,
        pictures=pictures,
        note=str(page.get("note") or ""),
        archived=page.get("archived") is True,
    )


def stamp(folder: Path) -> Stamp:
    """Equal stamps mean that a summary says the same."""
    paths = RunFolder(folder)
    found = []
    for path in (paths.status, paths.metrics, paths.config, paths.samples, folder / PAGE):
        try:
            stat = os.stat(path)
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return holder(folder), tuple(found)


def iso(seconds: float) -> str:
    """A time as text, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _object(path: Path, roots: tuple[Path, ...]) -> dict[str, Any]:
    try:
        check_file(path, roots, MOST_BYTES)
        return documents.read_object(path)
    except (OSError, ValueError):
        return {}


def _last_lines(path: Path, roots: tuple[Path, ...]) -> list[dict[str, Any]]:
    """The whole lines in the last bytes of a metrics file that can be read."""
    try:
        check_file(path, roots)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = os.pread(file.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    except (OSError, UserError):
        return []
    found = []
    for raw in data.split(b"\n")[0 if size <= _TAIL_BYTES else 1 : -1]:
        try:
            found.append(parse_line(raw, path, 0))
        except UserError:
            continue
    return found


def _latest(lines: list[dict[str, Any]], name: str) -> float | None:
    values = [line[name] for line in lines if isinstance(line.get(name), int | float) and math.isfinite(line[name])]
    return float(values[-1]) if values else None


def _pictures(paths: RunFolder, roots: tuple[Path, ...]) -> tuple[int | None, int]:
    """The newest save that has sample images, and how many of them a list shows."""
    try:
        check_file(paths.samples, roots)
        names = sorted((name for name in os.listdir(paths.samples) if name.startswith("step-")), reverse=True)
    except (OSError, ValueError):
        return None, 0
    for name in names[:2]:  # the newest may be in the making
        digits, listing = name.removeprefix("step-"), paths.samples / name / "samples.json"
        try:
            check_file(listing, roots, MOST_BYTES)
            entries = documents.parse(listing.read_bytes())
        except (OSError, ValueError):
            continue
        if digits.isdecimal() and isinstance(entries, list) and entries:
            return int(digits), min(_PICTURES, len(entries))
    return None, 0
