"""Rows of CSV and TSV files: read line by line, with the reasons of those that cannot be used. No torch here."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, ClassVar, NamedTuple

from daguerre.data.table.files import Unreadable
from daguerre.data.table.text import BOM, Record, TextTables
from daguerre.unicode import is_text

QUOTES = "line with unbalanced quotes (data.quote=none reads quotes as text)"
DELIMITER_NAMES = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}


class _Line(NamedTuple):
    """The text between the ends of two rows."""

    cells: list[str] | None
    """None where it cannot be parsed."""
    trouble: str
    offset: int
    length: int
    line: int


@dataclass(frozen=True)
class CsvTables(TextTables):
    """Text tables of one make."""

    every_column: ClassVar[bool] = False

    delimiter: str
    quote: str
    """"" for none."""
    names: tuple[str, ...] | None = None
    """The columns, where the files have no header line."""

    def header(self, file: BinaryIO) -> list[str]:
        """The names of the columns, checked; `names` if they are given."""
        first = next(self._lines(file), None)
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

    def records(self, file: BinaryIO, names: Sequence[str], at_start: bool = True) -> Iterator[Record]:
        lines = self._lines(file)
        if at_start and self.names is None:
            next(lines)
        for cells, trouble, *place in lines:
            trouble = trouble or _misfit(cells or [], len(names))
            yield Record({} if trouble else dict(zip(names, cells or [], strict=True)), trouble, *place)

    def _lines(self, file: BinaryIO) -> Iterator[_Line]:
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
                yield _Line(cells, trouble, offset, lines.offset - offset, line + 1)

    def _reader(self, lines: Iterator[str]) -> Iterator[list[str]]:
        if not self.quote:
            return csv.reader(lines, delimiter=self.delimiter, quoting=csv.QUOTE_NONE)
        return csv.reader(lines, delimiter=self.delimiter, quotechar=self.quote, strict=True)


def _said(error: csv.Error) -> str:
    text = str(error)
    if "NUL" in text:
        return "line with a zero byte"
    if "new-line character" in text:
        return "line that ends with a carriage return alone"
    if "field larger" in text:
        return "line with a cell of more than 131,072 letters"
    return QUOTES


def _misfit(cells: Sequence[str], columns: int) -> str:
    if len(cells) != columns:
        return f"line with {'fewer' if len(cells) < columns else 'more'} cells than the header"
    if not all(map(is_text, cells)):
        return "line that is not UTF-8"
    if any("\0" in cell for cell in cells):
        return "line with a zero byte"
    return ""


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
