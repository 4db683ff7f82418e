"""Rows of JSON Lines: an object a line.

Values are read as text, as the cells of a CSV are; null is an empty cell. No torch here.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

from daguerre import documents
from daguerre.data.table.files import Unreadable
from daguerre.data.table.text import BOM, Record, TextTables
from daguerre.unicode import is_text

LINE_BYTES = 1 << 20
"""Longest line."""
_NO_OBJECT = "line that is not a JSON object in UTF-8"


@dataclass(frozen=True)
class JsonLines(TextTables):
    """Tables of one object a line."""

    every_column: ClassVar[bool] = True

    def header(self, file: BinaryIO) -> list[str]:
        """The keys of the first line. `Unreadable` where it is no JSON object."""
        first = next(self.records(file, ()), None)
        if first is None:
            raise Unreadable("it is empty")
        if not first.cells:
            file.seek(0)
            start = file.read(4096).removeprefix(BOM)
            what = "a JSON list" if start.lstrip()[:1] == b"[" else f"{start[:60].decode('utf-8', 'replace')!r}"
            raise Unreadable(f"its first line must be a JSON object, one for each image, and it begins with {what}")
        return list(first.cells)

    def records(self, file: BinaryIO, names: Sequence[str], at_start: bool = True) -> Iterator[Record]:
        offset, number = 0, 0
        while raw := file.readline(LINE_BYTES):
            number += 1
            whole, length = raw, len(raw)
            while not whole.endswith(b"\n") and (more := file.readline(LINE_BYTES)):
                whole, length = more, length + len(more)  # too long to be used
            if raw.removeprefix(BOM).strip():
                cells = _cells(raw) if length == len(raw) else None
                yield Record(cells or {}, "" if cells is not None else _NO_OBJECT, offset, length, number)
            offset += length


def _cells(raw: bytes) -> dict[str, str] | None:
    """The values of a line as text; None where it is no JSON object in UTF-8."""
    try:
        found = documents.parse(raw.removeprefix(BOM))
        cells = {name: _cell(value) for name, value in found.items()} if isinstance(found, dict) else None
    except ValueError:
        return None
    usable = cells is not None and all(map(is_text, [*filter(None, cells), *filter(None, cells.values())]))
    return cells if usable else None


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
