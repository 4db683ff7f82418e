"""The source behind parquet, CSV and Hugging Face's tables: opens them, and gives their rows as records.

Which columns are read is `data/table/columns.py`, how files are read `data/table/files.py` and its like, what of them
can be used `data/table/index.py`. No torch here.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import numpy as np

from daguerre.data import skipped
from daguerre.data.images import kinds
from daguerre.data.images.headers import Undecodable
from daguerre.data.index import cache as index_cache
from daguerre.data.index.cache import BadIndex
from daguerre.data.index.file import save
from daguerre.data.index.index import Index
from daguerre.data.skipped import SkipReport
from daguerre.data.source import WHOLE_SHARE, Files, cache_of
from daguerre.data.table import columns as table_columns
from daguerre.data.table import images as table_images
from daguerre.data.table import verbatim
from daguerre.data.table.columns import Columns, TableSettings
from daguerre.data.table.files import CHANGED, File, Row, Tables, Unreadable, file_now, remote_file
from daguerre.data.table.index import Builder, base_of, digest_of, images_of, in_order, read_schema, texts_of, version
from daguerre.data.table.metadata import metadata_of
from daguerre.errors import UserError
from daguerre.storage.errors import Mismatch, StoreError
from daguerre.storage.file_cache import ShardCache
from daguerre.storage.location import Location
from daguerre.storage.retry import READINGS
from daguerre.types import IMAGE, Record

BLOCKS = 1 << 16
"""Maximum number of virtual shards for samples stored as separate files."""

ROW_COLUMNS = ("id", "digest", "row", "length", "line", "pieces")
"""Columns of an index that say where a row is."""


@dataclass(frozen=True)
class TableSource:
    """All rows of some tables that can be trained on, in the tables' order."""

    tables: Tables
    locations: tuple[Location, ...]
    index_paths: tuple[Path, ...]
    columns: Columns
    read: tuple[str, ...]
    """Every column that is read."""
    cache: ShardCache
    found: SkipReport
    whole: tuple[bool, ...] = ()
    """For each table, whether it is fetched whole if it is remote; nothing: all are."""
    metric: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def index(self) -> Index:
        """From the index files, by memory map."""
        index = index_cache.combined(self.index_paths)
        return in_blocks(index) if self._loose else index

    @cached_property
    def _starts(self) -> np.ndarray:
        """[files + 1] int64: the first sample of each table."""
        return np.cumsum([0, *(index_cache.head(path).count for path in self.index_paths)])

    @cached_property
    def _loose(self) -> bool:
        """Says whether images are files of their own."""
        return "loose" in index_cache.head(self.index_paths[0]).about.own

    def _at(self, number: int) -> tuple[int, dict[str, Any]]:
        """The table that a sample is in, and its row of the index."""
        table = int(np.searchsorted(self._starts, number, side="right")) - 1
        index, row = index_cache.load(self.index_paths[table]), number - int(self._starts[table])
        names = [name for name in ROW_COLUMNS if name in index.table.column_names]
        return table, {name: index.column(name)[row].as_py() for name in names}

    def stamps(self) -> np.ndarray | None:
        """Of the row's digest, and size and version of its table; None where images are files of their own."""
        return None if self._loose else index_cache.stamps(self.locations, self.index_paths)

    def caption_digests(self) -> np.ndarray | None:
        """Of images and texts, where a column has given the ids."""
        return index_cache.digests_of_given_ids(self.index_paths, "row")

    def sample_id(self, number: int) -> int:
        """By the table's contents and the row, or what its column `daguerre_id` says."""
        return int(self._at(number)[1]["id"])

    def name(self, number: int) -> str:
        """The table, and the row (from 0) or line (from 1) in it."""
        table, at = self._at(number)
        return f"{self.locations[table].name} " + (f"line {at['line']}" if "line" in at else f"row {at['row']}")

    def record(self, number: int) -> Record:
        """Reads the row, and the image where that is a file of its own."""
        table, at = self._at(number)
        location = self.locations[table]
        row, texts = self._row(self._file(table, bool(at.get("pieces"))), at)
        held = row[self.columns.image]
        images = {IMAGE: table_images.read(held, base_of(location))}
        for name, cell in images_of(row, self.columns).items():
            with kinds.named(name):
                images[name] = table_images.read(cell, base_of(location))
        captions = {column for name, column in self.columns.captions if name == table_columns.CAPTION}
        taken = {*self.columns.images, table_columns.ID, *captions}
        metadata = {k: metadata_of(v, self.tables.typed) for k, v in row.items() if k not in taken}
        return Record(self.name(number), images, texts, metadata)

    def _file(self, table: int, found: bool) -> File:
        """The table here; or far away, where its images are `found` by their places and few of them are wanted."""
        location, about = self.locations[table], index_cache.load(self.index_paths[table]).about
        if found and self.whole and not self.whole[table] and not self.cache.holds(location):
            return remote_file(location, about.shard_bytes)
        return self.cache.using(location, file_now, about.shard_digest)

    def _row(self, file: File, at: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """The row and its captions, as they were indexed: the image by its places in the file where they are known.

        `Undecodable` where it is another row now.
        """
        where = Row(at["row"], at.get("length", 0))
        near, pieces = file.location.local is not None, at.get("pieces")
        for way in (pieces, b"") if near and pieces else (pieces,) * (1 if near else READINGS):
            with suppress(Undecodable, Unreadable, Mismatch):
                wanted = [name for name in self.read if not (way and name == self.columns.image)]
                row = self.tables.row(file, where, wanted)
                if way:
                    row[self.columns.image] = verbatim.read(file.location, way)
                row = in_order(row, self.columns)
                texts = texts_of(row, self.columns)
                if digest_of(row.get(self.columns.image), texts, images_of(row, self.columns)) == at["digest"]:
                    return row, texts
        raise Undecodable(CHANGED)

    def report(self) -> SkipReport:
        """Rows that could not be used, and the columns that were chosen without a setting."""
        return self.found

    def reading(self, shares: np.ndarray) -> Self:
        """Far tables of which little is wanted are read by ranges, where that can be; the others are fetched whole."""
        if not self.is_remote or self._loose:
            return self
        told = replace(self, whole=tuple((shares >= WHOLE_SHARE).tolist()))
        if "index" in self.__dict__:
            told.__dict__["index"] = self.index
        return told

    @property
    def is_remote(self) -> bool:
        """Says whether tables are on a store; images at addresses are fetched one by one, when they are trained on."""
        return any(location.local is None for location in self.locations)

    @cached_property
    def files(self) -> Files:
        of_shards = np.searchsorted(self._starts, self.index.shard_starts[:-1], side="right") - 1
        sizes = []
        for table, location in enumerate(self.locations):
            head = index_cache.head(self.index_paths[table])
            by_ranges = self.whole and not self.whole[table] and "pieces" in head.columns
            sizes.append(0 if location.local is not None or by_ranges else head.about.shard_bytes)
        return Files(of_shards, np.array(sizes, dtype=np.int64))

    def prefetch(self, file: int) -> int:
        """Fetches a far table that is read whole, if it is not in the cache; its size in bytes."""
        size = int(self.files.sizes_bytes[file])
        if size:
            self.cache.path(self.locations[file], index_cache.head(self.index_paths[file]).about.shard_digest)
        return size


def in_blocks(index: Index) -> Index:
    """The index of samples in files of their own, in many small shards: nothing is gained by reading neighbours, and
    the order is the better mixed."""
    block = max(1, -(-index.count // BLOCKS))
    starts = np.union1d(index.shard_starts, np.arange(0, index.count, block, dtype=np.int64))
    return replace(index, shard_starts=starts)


def open_tables(settings: TableSettings, tables: Tables, locations: Sequence[Location]) -> TableSource:
    """Chooses the columns and indexes what is not yet. UserError where no row can be used, or a store gives nothing."""
    try:
        return _opened(settings, tables, locations)
    except StoreError as error:
        raise UserError(str(error), code="unreachable", setting=error.setting or None) from None


def _opened(settings: TableSettings, tables: Tables, locations: Sequence[Location]) -> TableSource:
    cache = cache_of(settings)
    first = cache.using(locations[0], lambda file: read_schema(tables, file, locations[0]))
    columns = table_columns.choose(first, settings, locations[0].name)
    made_by = repr((tables, columns.digest, settings.formats)).encode()
    kind = f"{settings.source} {blake2b(made_by, digest_size=8).hexdigest()}"
    _forget_changed(locations, kind, cache.folder)
    builder = Builder(tables, columns, first, settings.formats, kind, cache)
    paths = index_cache.indexes(locations, kind, builder, cache.folder)
    found = skipped.merged(
        index_cache.left_out(paths), index_cache.changed(locations, paths), _said(columns, locations)
    )
    if not any(index_cache.head(path).count for path in paths):
        raise UserError(
            f"data.path: no row of {locations[0].name}{' and the other tables' * (len(locations) > 1)} can be used "
            f"({', '.join(columns.automatic) or 'with these columns'}):\n{skipped.table(found)}",
            code="empty",
            setting="data.path",
        )
    read = tuple(columns.read(first))
    return TableSource(tables, tuple(locations), tuple(paths), columns, read, cache, found)


def _forget_changed(locations: Sequence[Location], kind: str, cache_dir: Path) -> None:
    """Removes indexes in the cache whose tables here are no longer what they were: people edit tables. One that was
    only touched (copied, given other rights) keeps its index, which notes that."""
    for location in locations:
        path = index_cache.home(location, kind, cache_dir)
        with suppress(FileNotFoundError):
            try:
                _note_touched(location, path)
            except BadIndex:
                path.unlink()


def _note_touched(location: Location, path: Path) -> None:
    """Compares a table that was touched with its index at `path`, which is removed or notes it. BadIndex."""
    about, local = index_cache.head(path).about, location.local
    if local is None or version(location, local) == about.version:
        return
    before, now = index_cache.load(path), version(location, local)
    before.whole()
    path.unlink()
    if index_cache.file_digest(local) == about.shard_digest:
        save(replace(before, about=replace(about, version=now)), path)


def _said(columns: Columns, locations: Sequence[Location]) -> SkipReport:
    """A note of what was chosen without a setting."""
    counts: skipped.Counts = {}
    if columns.automatic:
        reason = f"columns chosen by type and name: {', '.join(columns.automatic)}"
        for location in locations:
            skipped.add(counts, reason, location.name, kept=True)
    return counts
