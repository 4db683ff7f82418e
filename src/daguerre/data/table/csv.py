"""Rows of CSV and TSV files by their bytes: where each begins, what is wrong with those that cannot be used.

A file is read line by line; a row is found again by its first byte and its length. No torch here.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from daguerre.data.images.headers import Undecodable
from daguerre.data.table.files import CHANGED, Damage, File, Part, Row, Unreadable, file_now
from daguerre.unicode import is_text

BOM = b"\xef\xbb\xbf"
PART_ROWS = 4096
QUOTES = "line with unbalanced quotes (data.quote=none reads quotes as text)"
DELIMITER_NAMES = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}


class _Record(NamedTuple):
    """The text between the ends of two rows."""

    cells: list[str] | None
    """None where it cannot be parsed."""
    trouble: str
    offset: int
    length: int
    line: int


@dataclass(frozen=True)
class CsvTables:
    """Text tables of one make."""

    typed: ClassVar[bool] = False

    delimiter: str
    quote: str
    """"" for none."""
    names: tuple[str, ...] | None = None
    """The columns, where the files have no header line."""

    def schema(self, file: Path) -> pa.Schema:
        """The columns, all of text. `Unreadable` where there are none, or the file is no such table."""
        return pa.schema([pa.field(name, pa.string()) for name in _names(self, file_now(file))])

    def header(self, file: BinaryIO) -> list[str]:
        """The names of the columns, checked; `names` if they are given."""
        check_is_text(file.read(4096).removeprefix(BOM))
        file.seek(0)
        first = next(self.records(file), None)
        if first is None:
            raise Unreadable("it is empty")
        if first.cells is None:
            raise Unreadable(f"line {first.line}: {first.trouble}")
        cells = list(self.names or (cell.strip() for cell in first.cells))
        if self.names and len(first.cells) != len(cells):
            raise Unreadable(f"line {first.line} has {len(first.cells)} cells, but data.columns names {len(cells)}")
        for other, name in DELIMITER_NAMES.items():
            if len(cells) == 1 and other in (cell := first.cells[0]) and other != self.delimiter:
                raise Unreadable(f"it has one column, with {name} in it ({cell[:60]!r}): set data.delimiter={other!r}")
        if "" in cells:
            raise Unreadable(f"line {first.line}, the header: column {cells.index('') + 1} has no name")
        if not all(map(is_text, cells)):
            raise Unreadable(f"line {first.line}, the header, is not UTF-8")
        return cells

    def parts(self, file: Path, columns: Sequence[str], image: str, where: str) -> Iterator[Part | Damage]:
        """All rows in order, and each that cannot be used."""
        names = self.schema(file).names
        chosen = [names.index(name) for name in columns]
        rows: list[_Record] = []
        with file.open("rb") as opened:
            records = self.records(opened)
            if self.names is None:
                next(records)
            for record in records:
                trouble = record.trouble or _misfit(record, len(names))
                if trouble:
                    yield Damage(trouble, 1, f"{where} line {record.line}")
                    continue
                rows.append(record)
                if len(rows) == PART_ROWS:
                    yield _part(rows, columns, chosen)
                    rows = []
        if rows:
            yield _part(rows, columns, chosen)

    def row(self, file: File, at: Row, columns: Sequence[str]) -> dict[str, Any]:
        names = _names(self, file)
        with open(file.path, "rb") as opened:
            opened.seek(at.number)
            raw = opened.read(at.num_bytes)
        record = next(self.records(io.BytesIO(raw)), None) if len(raw) == at.num_bytes else None
        if record is None or record.cells is None or len(record.cells) != len(names):
            raise Undecodable(CHANGED)
        found = dict(zip(names, record.cells, strict=True))
        return {name: found[name] for name in columns if name in found}

    def records(self, file: BinaryIO) -> Iterator[_Record]:
        """Every row that is not blank. Where a quote opens and is not closed well, only its line is lost."""
        lines = _Lines(file)
        reader, width = self._reader(lines), 0
        while True:
            offset, line = lines.offset, lines.number
            lines.row_lines.clear()
            try:
                cells: list[str] | None = next(reader)
                trouble = ""
            except StopIteration:
                return
            except csv.Error as error:
                cells, trouble = None, _said(error)
            width = width or len(cells or ())
            if lines.number - line > 1 and (cells is None or len(cells) != width):
                cells, trouble = None, QUOTES
                lines.back_to(offset + len(lines.row_lines[0]), line + 1)
                reader = self._reader(lines)
            if cells != []:
                yield _Record(cells, trouble, offset, lines.offset - offset, line + 1)

    def _reader(self, lines: Iterator[str]) -> Iterator[list[str]]:
        if not self.quote:
            return csv.reader(lines, delimiter=self.delimiter, quoting=csv.QUOTE_NONE)
        return csv.reader(lines, delimiter=self.delimiter, quotechar=self.quote, strict=True)


@lru_cache(maxsize=256)
def _names(tables: CsvTables, file: File) -> tuple[str, ...]:
    with open(file.path, "rb") as opened:
        return tuple(tables.header(opened))


def _said(error: csv.Error) -> str:
    text = str(error)
    if "NUL" in text:
        return "line with a zero byte"
    if "new-line character" in text:
        return "line that ends with a carriage return alone"
    if "field larger" in text:
        return "line with a cell of more than 131,072 letters"
    return QUOTES


def _misfit(record: _Record, columns: int) -> str:
    assert record.cells is not None
    if len(record.cells) != columns:
        return f"line with {'fewer' if len(record.cells) < columns else 'more'} cells than the header"
    if not all(map(is_text, record.cells)):
        return "line that is not UTF-8"
    if any("\0" in cell for cell in record.cells):
        return "line with a zero byte"
    return ""


def _part(rows: Sequence[_Record], columns: Sequence[str], chosen: Sequence[int]) -> Part:
    cells = [pa.array([row.cells[i] for row in rows if row.cells is not None], pa.string()) for i in chosen]
    spans = np.array([(row.offset, row.length, row.line) for row in rows], dtype=np.int64)
    return Part(spans[:, 0], pa.RecordBatch.from_arrays(cells, list(columns)), spans)


class _Lines(Iterator[str]):
    """The lines of a file, with a count of what was given out; bytes that are no UTF-8 come as escapes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.offset = 0
        self.number = 0
        self.row_lines: list[bytes] = []

    def __next__(self) -> str:
        raw = self.file.readline(1 << 20)
        if not raw:
            raise StopIteration
        self.offset += len(raw)
        self.number += 1
        self.row_lines.append(raw)
        if self.number == 1:
            raw = raw.removeprefix(BOM)
        return raw.decode("utf-8", "surrogateescape")

    def back_to(self, offset: int, number: int) -> None:
        """Goes on after `number` lines of `offset` bytes."""
        self.offset, self.number = offset, number
        self.file.seek(offset)


def check_is_text(start: bytes) -> None:
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
