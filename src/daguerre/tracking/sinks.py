"""Sinks of a run's numbers: `metrics.jsonl`, the record that everything else reads. Trackers are copies of it.

Holds writing, reading and, on resume, truncating. The loop and the trainer decide what is measured, and when.

A line of `metrics.jsonl` is one JSON object: `step` (updates done), `samples` (samples seen), `time` (UTC, ISO 8601),
then numbers in the order of their names, such as `learning/loss`. Floats are written so that they read back to the bit.
JSON has no non-finite numbers: they are the strings "nan", "inf" and "-inf", which `float()` reads back.
"""

import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from daguerre import documents, regular
from daguerre.checkpoint.atomic import write_bytes_atomically
from daguerre.errors import UserError

RESERVED = ("step", "samples", "time")
"""Keys of a line that are no metric."""


class Sink(Protocol):
    """Takes the numbers of one step at a time."""

    def write(self, step: int, samples: int, values: Mapping[str, float]) -> None:
        """Record `values` after `step` updates, when `samples` samples had been seen."""

    def show(self, step: int, name: str, pixels_HWC: np.ndarray, text: str) -> None:
        """Take an image, uint8 RGB [H, W, 3], that was generated after `step` updates, and its prompt."""

    def close(self) -> None:
        """Write what is still held back, and let go of the files."""


class MetricsFile:
    """`metrics.jsonl`: appends, and hands each line to the system at once, so that a killed run keeps its numbers.

    What a disk refuses is kept, and written with the next line that it takes.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        assert _ends_whole(path), f"{path} ends in a torn line: call cut_after first"
        self._file = path.open("ab", buffering=0)
        self._left = b""

    def write(self, step: int, samples: int, values: Mapping[str, float]) -> None:
        """Append one line. OSError when the disk refuses it."""
        assert not set(RESERVED) & set(values), f"{RESERVED} are no names for metrics"
        line: dict[str, Any] = {"step": int(step), "samples": int(samples)}
        line["time"] = datetime.now(UTC).isoformat(timespec="seconds")
        line |= {name: _to_json(values[name]) for name in sorted(values)}  # sums come from a checkpoint in its order
        self._left += json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        self._write()

    def show(self, step: int, name: str, pixels_HWC: np.ndarray, text: str) -> None:
        """Nothing: images are files of their own."""

    def _write(self) -> None:
        while self._left:
            self._left = self._left[self._file.write(self._left) :]

    def close(self) -> None:
        """Force the file to the disk and close it."""
        if self._file.closed:
            return
        try:
            self._write()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a `metrics.jsonl`, oldest first, strings of non-finite numbers turned into floats.

    A torn last line, which a kill or a running writer leaves, is left out. No file is no lines. A line that is
    no metrics line anywhere else is a UserError: something else than a run has written to the file.
    """
    return [line for line, _ in _lines(path)]


def truncate_after(path: Path, step: int) -> int:
    """Drop the lines after the checkpoint at `step`, and a torn last line; returns how many lines went.

    With no checkpoint, `step` = -1 drops all. The file is replaced in one move, so that a kill leaves the old or the
    new one. Numbers of the checkpoint's own step stay: write them before the checkpoint. UserError as `read_metrics`.
    """
    if not path.exists():
        return 0
    kept = b"".join(raw for line, raw in _lines(path) if line["step"] <= step)
    before = regular.content(path)
    if kept == before:
        return 0
    write_bytes_atomically(path, kept)
    return len(before.splitlines()) - len(kept.splitlines())


def _lines(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    """Each whole line, parsed and as bytes with its line end."""
    if not path.exists():
        return []
    *whole, _torn = regular.content(path).split(b"\n")
    return [(parse_line(raw, path, number), raw + b"\n") for number, raw in enumerate(whole, 1)]


def parse_line(raw: bytes, path: Path, number: int) -> dict[str, Any]:
    """One line, its non-finite numbers as floats. UserError, with its number, for one that is no metrics line."""
    try:
        line = documents.parse(raw)
    except ValueError:  # of JSON or of UTF-8
        line = None
    if not isinstance(line, dict) or not all(isinstance(line.get(key), int) for key in ("step", "samples")):
        raise UserError(
            f"{path}, line {number}: not a line of metrics: {raw[:80]!r}; each line is a JSON object with "
            '"step" and "samples". Remove the line, or move the file aside: the run does not need it to continue',
            code="damaged",
        )
    return {key: value if key == "time" else _from_json(value) for key, value in line.items()}


def _to_json(value: float) -> float | str:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else str(number)


def _from_json(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


def _ends_whole(path: Path) -> bool:
    """True for a file that is missing, empty or ends in a line end."""
    if not path.exists() or path.stat().st_size == 0:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
