"""Rows of JSON Lines: an object a line, found again by its first byte and its length.

Values are read as text, as the cells of a CSV are; null is an empty cell. No torch here.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from daguerre.data.images.headers import Undecodable
from daguerre.data.table.csv import BOM, PART_ROWS, check_is_text
from daguerre.data.table.files import CHANGED, Damage, File, Part, Row, Unreadable, file_now
from daguerre.unicode import is_text

LINE_BYTES = 1 << 20
"""Longest line."""
_NO_OBJECT = "line that is not a JSON object in UTF-8"


class _Line(NamedTuple):
    """A line that is not blank."""

    cells: dict[str, str] | None
    """None where it cannot be used."""
    offset: int
    length: int
    number: int


@dataclass(frozen=True)
class JsonLines:
    """Tables of one object a line."""

    typed: ClassVar[bool] = False

    def schema(self, file: Path) -> pa.Schema:
        """The keys of the first line, all of text. `Unreadable` where it is no JSON object."""
        return pa.schema([pa.field(name, pa.string()) for name in _names(file_now(file))])

    def parts(self, file: Path, columns: Sequence[str], image: str, where: str) -> Iterator[Part | Damage]:
        """All rows in order, and each that cannot be used. A key that a line lacks is an empty cell."""
        rows: list[_Line] = []
        with file.open("rb") as opened:
            for line in _lines(opened):
                if line.cells is None:
                    yield Damage(_NO_OBJECT, 1, f"{where} line {line.number}")
                    continue
                rows.append(line)
                if len(rows) == PART_ROWS:
                    yield _part(rows, columns)
                    rows = []
        if rows:
            yield _part(rows, columns)

    def row(self, file: File, at: Row, columns: Sequence[str]) -> dict[str, Any]:
        with open(file.path, "rb") as opened:
            opened.seek(at.number)
            raw = opened.read(at.num_bytes)
        cells = _cells(raw) if len(raw) == at.num_bytes else None
        if cells is None:
            raise Undecodable(CHANGED)
        return {name: cells.get(name, "") for name in columns}


@lru_cache(maxsize=256)
def _names(file: File) -> tuple[str, ...]:
    with open(file.path, "rb") as opened:
        start = opened.read(4096).removeprefix(BOM)
        check_is_text(start)
        opened.seek(0)
        first = next(_lines(opened), None)
    if first is None:
        raise Unreadable("it is empty")
    if not first.cells:
        what = "a JSON list" if start.lstrip()[:1] == b"[" else f"{start[:60].decode('utf-8', 'replace')!r}"
        raise Unreadable(f"its first line must be a JSON object, one for each image, and it begins with {what}")
    return tuple(first.cells)


def _lines(file: BinaryIO) -> Iterator[_Line]:
    offset, number = 0, 0
    while raw := file.readline(LINE_BYTES):
        number += 1
        whole, length = raw, len(raw)
        while not whole.endswith(b"\n") and (more := file.readline(LINE_BYTES)):
            whole, length = more, length + len(more)  # too long to be used
        if raw.removeprefix(BOM).strip():
            yield _Line(_cells(raw) if length == len(raw) else None, offset, length, number)
        offset += length


def _cells(raw: bytes) -> dict[str, str] | None:
    """The values of a line as text; None where it is no JSON object in UTF-8."""
    try:
        found = json.loads(raw.removeprefix(BOM))
        cells = {name: _cell(value) for name, value in found.items()} if isinstance(found, dict) else None
    except (ValueError, RecursionError):
        return None
    usable = cells is not None and all(map(is_text, [*filter(None, cells), *filter(None, cells.values())]))
    return cells if usable else None


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _part(rows: Sequence[_Line], columns: Sequence[str]) -> Part:
    every = [row.cells for row in rows if row.cells is not None]
    cells = [pa.array([row.get(name, "") for row in every], pa.string()) for name in columns]
    spans = np.array([(row.offset, row.length, row.number) for row in rows], dtype=np.int64)
    return Part(spans[:, 0], pa.RecordBatch.from_arrays(cells, list(columns)), spans)
