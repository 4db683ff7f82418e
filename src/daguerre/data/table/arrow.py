"""Rows of Arrow files, as `datasets` keeps its data sets: memory-mapped, so that any row is there at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from daguerre.data.images.headers import Undecodable
from daguerre.data.table.files import CHANGED, Changed, Damage, File, Part, Row, Unreadable, damage_as, file_now, values

END = b"\xff\xff\xff\xff\0\0\0\0"
"""What a whole stream ends with."""


@dataclass(frozen=True)
class ArrowTables:
    """Arrow files in the streaming format, as `datasets` writes them, or in the file format."""

    typed: ClassVar[bool] = True

    def schema(self, file: Path) -> pa.Schema:
        """The columns. `Unreadable` where the file is no Arrow file, or is cut."""
        with damage_as(Unreadable):
            return _arrow(file_now(file)).schema

    def parts(self, file: Path, columns: Sequence[str], image: str, where: str) -> Iterator[Part | Damage]:
        """Batch by batch."""
        opened = _arrow(file_now(file))
        for start, batch in zip(opened.starts.tolist(), opened.batches, strict=False):
            for first in range(0, batch.num_rows, 256):
                part = batch.slice(first, 256).select([name for name in columns if name in opened.schema.names])
                yield from _sound(part, start + first, where)

    def row(self, file: File, at: Row, columns: Sequence[str]) -> dict[str, Any]:
        """From the map of the file: nothing else is read."""
        with damage_as(Changed):
            opened = _arrow(file)
            if at.number >= opened.starts[-1]:
                raise Undecodable(CHANGED)
            which = int(np.searchsorted(opened.starts, at.number, side="right")) - 1
            there = [name for name in columns if name in opened.schema.names]
            row = opened.batches[which].slice(at.number - int(opened.starts[which]), 1).select(there)
            row.validate(full=True)
            return values(row, 0)


def _sound(part: pa.RecordBatch, start: int, where: str) -> Iterator[Part | Damage]:
    """The rows from `start` on; of a part that is not sound as a whole row by row, as one text may be none."""
    try:
        part.validate(full=True)  # what lies in a map is believed otherwise, and read wherever it leads
        yield Part(np.arange(start, start + part.num_rows), part)
    except pa.ArrowInvalid as error:
        if part.num_rows > 1:
            for row in range(part.num_rows):
                yield from _sound(part.slice(row, 1), start + row, where)
            return
        said = str(error)
        reason = "text that is not UTF-8" if "UTF8" in said else "damaged part: these rows cannot be read"
        yield Damage(reason, 1, f"{where} row {start}: {said[:100]}")


class _Arrow(NamedTuple):
    schema: pa.Schema
    batches: list[pa.RecordBatch]
    starts: np.ndarray


@lru_cache(maxsize=64)
def _arrow(file: File) -> _Arrow:
    source = pa.memory_map(file.path)
    if source.size() >= 6 and source.read_at(6, 0) == b"ARROW1":
        reader = ipc.open_file(source)
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    else:
        reader = ipc.open_stream(source)
        batches = list(reader)  # ends silently where the file is cut between two batches
        if source.read_at(len(END), source.size() - len(END)) != END:
            raise ValueError("it ends too early: it is cut off, or was never finished")
    return _Arrow(reader.schema, batches, np.cumsum([0, *(batch.num_rows for batch in batches)]))
