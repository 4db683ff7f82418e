"""The contract of the kinds of table files: rows by number, a bounded number at a time, damage distinguished from
transient faults.

Parquet is `data/table/parquet.py`, Arrow `data/table/arrow.py`, text `data/table/text.py`; what the columns mean is
`data/table/columns.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from daguerre.data.images.headers import Undecodable
from daguerre.formatting import first_line
from daguerre.storage import local_files
from daguerre.storage.errors import StoreError
from daguerre.storage.location import Location

CHANGED = "bytes differ from the index"
"""Reason of a sample that is not what it was when it was indexed."""


class Part(NamedTuple):
    """Consecutive rows of a table."""

    rows: np.ndarray
    """[n] int64: their numbers in the file, or where they begin in it."""
    batch: pa.RecordBatch
    spans: np.ndarray | None = None
    """[n, 3] int64: first byte, length and first line of each, where a table is text."""
    images_from: int | None = None
    """Where the images of these and the following rows begin in the file, if they stand there as they are."""


class Damage(NamedTuple):
    """Rows that cannot be read."""

    reason: str
    rows: int
    where: str


class Tables(Protocol):
    """One kind of table file; small, and travels to the workers."""

    typed: ClassVar[bool]
    """Whether columns have types; else all is text, and numbers are what looks like one."""

    def schema(self, file: Path) -> pa.Schema:
        """The columns. `Unreadable` for a file of another kind."""

    def parts(self, file: Path, columns: Sequence[str], image: str, where: str) -> Iterator[Part | Damage]:
        """All rows in order, a bounded number at a time; `image` is one of the columns."""

    def row(self, file: File, at: Row, columns: Sequence[str]) -> dict[str, Any]:
        """One row. `Undecodable` where the file is not what was indexed; OSError for a fault of the disk."""


class Row(NamedTuple):
    """The place of a row."""

    number: int
    """Its number, or, in a text, its first byte."""
    num_bytes: int = 0


class File(NamedTuple):
    """A file as it is now: what is kept of it is not taken for another one's of that name."""

    path: str
    version: str
    size_bytes: int

    @property
    def location(self) -> Location:
        return Location(self.path)


def remote_file(location: Location, size_bytes: int) -> File:
    """A file in a store that is read by ranges."""
    return File(location.url, "", size_bytes)


def file_now(path: Path) -> File:
    """OSError without a file."""
    return File(str(path), local_files.version(path), path.stat().st_size)


class Unreadable(Exception):
    """A file that is no table of its kind. The text says what it is instead."""


@contextmanager
def damage_as(error_kind: type[Unreadable | Changed]) -> Iterator[None]:
    """Raises pyarrow's errors for damaged bytes as another one; a fault of the disk stays what it is."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, OSError) and (error.errno is not None or isinstance(error, StoreError)):
            raise
        raise error_kind(first_line(error)[:200]) from error


class Changed(Undecodable):
    """Any damage that shows only when a row is read."""

    def __init__(self, text: str) -> None:
        super().__init__(CHANGED)


def values(batch: pa.RecordBatch | pa.Table, row: int) -> dict[str, Any]:
    """{column: value} of one row; a text that is no UTF-8 is None."""
    return {name: _value(batch.column(i)[row]) for i, name in enumerate(batch.schema.names)}


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return None


def listed(column: pa.Array) -> list[Any]:
    """The values of a column; a text that is no UTF-8 is None."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]
