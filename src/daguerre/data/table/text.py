"""Rows of text tables by their bytes: a row is found again by its first byte and its length. No torch here.

What a row is, `csv.py` and `json_lines.py` say; here are the index of a file's rows and the way back to one of them.
"""

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from daguerre.data.images.headers import Undecodable
from daguerre.data.table.files import CHANGED, Damage, File, Part, Row, Unreadable, file_now

BOM = b"\xef\xbb\xbf"
PART_ROWS = 4096


class Record(NamedTuple):
    """The text of a row."""

    cells: dict[str, str]
    """By column; nothing where it cannot be used."""
    trouble: str
    """The reason why it cannot be used; empty for others."""
    offset: int
    length: int
    line: int
    """Its first line, from 1."""


class TextTables(ABC):
    """Text tables of one make, whose columns are all text (see `files.Tables`)."""

    typed: ClassVar[bool] = False
    every_column: ClassVar[bool]
    """Whether each row has all columns, those that it does not name as empty cells."""

    @abstractmethod
    def header(self, file: BinaryIO) -> list[str]:
        """The columns. `Unreadable` where there are none, or the file is no such table."""

    @abstractmethod
    def records(self, file: BinaryIO, names: Sequence[str], at_start: bool = True) -> Iterator[Record]:
        """Every row that is not blank, from the start of a file, or of one row of it alone."""

    def schema(self, file: Path) -> pa.Schema:
        return pa.schema([pa.field(name, pa.string()) for name in _names(self, file_now(file))])

    def parts(self, file: Path, columns: Sequence[str], image: str, where: str) -> Iterator[Part | Damage]:
        """All rows in order, and each that cannot be used. A column that a row lacks is an empty cell."""
        names, rows = _names(self, file_now(file)), list[Record]()
        with file.open("rb") as opened:
            for record in self.records(opened, names):
                if record.trouble:
                    yield Damage(record.trouble, 1, f"{where} line {record.line}")
                    continue
                rows.append(record)
                if len(rows) == PART_ROWS:
                    yield _part(rows, columns)
                    rows = []
        if rows:
            yield _part(rows, columns)

    def row(self, file: File, at: Row, columns: Sequence[str]) -> dict[str, Any]:
        names = _names(self, file)
        with open(file.path, "rb") as opened:
            opened.seek(at.number)
            raw = opened.read(at.num_bytes)
        record = next(self.records(io.BytesIO(raw), names, at_start=False), None) if len(raw) == at.num_bytes else None
        if record is None or record.trouble:
            raise Undecodable(CHANGED)
        wanted = columns if self.every_column else [name for name in columns if name in record.cells]
        return {name: record.cells.get(name, "") for name in wanted}


@lru_cache(maxsize=256)
def _names(tables: TextTables, file: File) -> tuple[str, ...]:
    with open(file.path, "rb") as opened:
        _check_is_text(opened.read(4096).removeprefix(BOM))
        opened.seek(0)
        return tuple(tables.header(opened))


def _part(rows: Sequence[Record], columns: Sequence[str]) -> Part:
    cells = [pa.array([row.cells.get(name, "") for row in rows], pa.string()) for name in columns]
    spans = np.array([(row.offset, row.length, row.line) for row in rows], dtype=np.int64)
    return Part(spans[:, 0], pa.RecordBatch.from_arrays(cells, list(columns)), spans)


def _check_is_text(start: bytes) -> None:
    """`Unreadable` for the first bytes of a file that is something else than text in UTF-8."""
    shown = start[:60].decode("utf-8", "replace")
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Unreadable("it is UTF-16: save it as UTF-8")
    if start.lstrip()[:1] == b"<":
        raise Unreadable(f"it is a page of HTML or XML, not a table: {shown!r}")
    if start.startswith((b"PK", b"PAR1", b"ARROW1", b"\x1f\x8b", b"\xd0\xcf")):
        raise Unreadable("it is a compressed or binary file, not text")
    if b"\r" in start and b"\n" not in start:
        raise Unreadable("its lines end with a carriage return alone (old Macintosh): save it with usual line ends")
