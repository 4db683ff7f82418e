"""Rows of parquet files, which can be decoded only by row groups: those used last are kept, up to a bound."""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from daguerre.data.images.headers import Undecodable
from daguerre.data.table.files import CHANGED, Changed, Damage, File, Part, Row, Unreadable, damage_as, file_now, values
from daguerre.storage.remote_file import RemoteFile

KEPT_BYTES = 256 << 20
"""Decoded row groups that a process keeps."""
LARGE_BYTES = 64 << 20
"""A row group that is larger when decoded is walked through in slices instead: in order fast, elsewhere slow."""
SLICE_BYTES = 8 << 20


@dataclass(frozen=True)
class ParquetTables:
    """Parquet files."""

    typed: ClassVar[bool] = True

    def schema(self, file: Path) -> pa.Schema:
        """The columns. `Unreadable` where the file is no parquet file, or is cut."""
        with damage_as(Unreadable):
            return _parquet(file_now(file)).schema_arrow

    def parts(self, file: Path, columns: Sequence[str], image: str, where: str) -> Iterator[Part | Damage]:
        """Row group by row group; of a damaged one what comes before the damage."""
        now, start = file_now(file), 0
        with damage_as(Unreadable):
            opened = _parquet(now)
        for group in range(opened.num_row_groups):
            count, done = opened.metadata.row_group(group).num_rows, 0
            try:
                with damage_as(Unreadable):
                    begin = _begin(now, group, image)
                    for batch in _batches(now, group, columns):
                        rows = np.arange(start + done, start + done + batch.num_rows)
                        yield Part(rows, batch, images_from=None if done else begin)
                        done += batch.num_rows
            except Unreadable as error:
                lost = f"{where} rows {start + done} to {start + count - 1}: {error}"
                yield Damage("damaged row group: these rows cannot be read", max(1, count - done), lost)
            start += count

    def row(self, file: File, at: Row, columns: Sequence[str]) -> dict[str, Any]:
        """Through the row group that holds it."""
        with damage_as(Changed):
            starts = _starts(file)
            if at.number >= starts[-1]:
                raise Undecodable(CHANGED)
            group = int(np.searchsorted(starts, at.number, side="right")) - 1
            return _GROUPS.row(file, group, at.number - int(starts[group]), tuple(columns))

    def slow(self, file: Path, columns: Sequence[str]) -> str:
        """The reason why these columns are slow to read in a shuffled order: row groups larger than what is decoded at
        once. "" where there are none."""
        now = file_now(file)
        largest = 0
        for group in range(_parquet(now).num_row_groups):
            with suppress(Unreadable), damage_as(Unreadable):  # its rows are counted as lost already
                largest = max(largest, _group_bytes(now, group, columns))
        return "" if largest <= LARGE_BYTES else f"row groups of up to {largest / 1e6:,.0f} MB"


@lru_cache(maxsize=32)
def _parquet(file: File) -> pq.ParquetFile:
    far = file.location.local is None
    source = pa.PythonFile(RemoteFile(file.location, file.size_bytes), "r") if far else file.path
    return pq.ParquetFile(source, memory_map=False, pre_buffer=far, buffer_size=0 if far else 1 << 16)


@lru_cache(maxsize=256)
def _starts(file: File) -> np.ndarray:
    """[groups + 1] int64: the first row of each row group, and the number of rows."""
    metadata = _parquet(file).metadata
    return np.cumsum([0, *(metadata.row_group(g).num_rows for g in range(metadata.num_row_groups))])


@lru_cache(maxsize=4096)
def _chunks(file: File, group: int, columns: frozenset[str]) -> list[pq.ColumnChunkMetaData]:
    """The footer's entries of columns in a row group. Raises what reading them raises where that is damaged.

    To look at a damaged entry of a footer ends the whole process (in pyarrow, at least to 26), while to read the column
    fails as it should: so a row is read first, of files that are here. Far ones were here when they were indexed.
    """
    opened = _parquet(file)
    if file.location.local is not None:
        next(opened.iter_batches(1, row_groups=[group], columns=sorted(columns), use_threads=False), None)
    about, schema = opened.metadata.row_group(group), opened.schema
    wanted = (i for i in range(about.num_columns) if schema.column(i).path.split(".")[0] in columns)
    return [about.column(i) for i in wanted]


def _group_bytes(file: File, group: int, columns: Sequence[str]) -> int:
    """Bytes of the columns of a row group when they are decoded; dictionaries may take more."""
    return sum(chunk.total_uncompressed_size for chunk in _chunks(file, group, frozenset(columns)))


def _begin(file: File, group: int, image: str) -> int:
    """The first byte of the column of images in a row group."""
    chunks = _chunks(file, group, frozenset([image]))
    own = [chunk for chunk in chunks if chunk.path_in_schema in (image, f"{image}.bytes")]
    return min((at for c in own for at in (c.data_page_offset, c.dictionary_page_offset) if at), default=0)


def _batches(file: File, group: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    opened = _parquet(file)
    rows = max(1, opened.metadata.row_group(group).num_rows)
    mean_bytes = _group_bytes(file, group, columns) / rows
    size = int(min(max(1, SLICE_BYTES // max(1, mean_bytes)), 4096))
    return opened.iter_batches(size, row_groups=[group], columns=list(columns), use_threads=False)


_Key = tuple[File, int, tuple[str, ...]]


@dataclass
class _Walk:
    """A place in a large row group."""

    batches: Iterator[pa.RecordBatch]
    start: int
    batch: pa.RecordBatch


@dataclass
class _RowGroups:
    """Decoded row groups, those used last; and places in the large ones. One a process."""

    held: OrderedDict[_Key, pa.Table] = field(default_factory=OrderedDict)
    held_bytes: int = 0
    walks: OrderedDict[_Key, _Walk] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def row(self, file: File, group: int, row: int, columns: tuple[str, ...]) -> dict[str, Any]:
        with self.lock:
            if _group_bytes(file, group, columns) > LARGE_BYTES:
                walk = self._walked(file, group, row, columns)
                return values(walk.batch, row - walk.start)
            return values(self._table(file, group, columns), row)

    def _table(self, file: File, group: int, columns: tuple[str, ...]) -> pa.Table:
        key = file, group, columns
        if key not in self.held:
            table = _parquet(file).read_row_group(group, columns=list(columns), use_threads=False)
            self.held[key] = table
            self.held_bytes += table.nbytes
            while self.held_bytes > KEPT_BYTES and len(self.held) > 1:
                self.held_bytes -= self.held.popitem(last=False)[1].nbytes
        self.held.move_to_end(key)
        return self.held[key]

    def _walked(self, file: File, group: int, row: int, columns: tuple[str, ...]) -> _Walk:
        key = file, group, columns
        walk = self.walks.pop(key, None)
        if walk is None or row < walk.start:
            batches = _batches(file, group, columns)
            walk = _Walk(batches, 0, next(batches))
        while row >= walk.start + walk.batch.num_rows:
            walk.start += walk.batch.num_rows
            walk.batch = next(walk.batches)
        self.walks[key] = walk
        while len(self.walks) > 4:
            self.walks.popitem(last=False)
        return walk


_GROUPS = _RowGroups()
