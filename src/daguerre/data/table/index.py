"""The index of one table: which of its rows can be trained on, their sizes, digests and metadata, and what is left out.

Rows come from `data/table/files.py` and its like, images from `data/table/images.py`; how index files
are kept is `data/index/cache.py`. No torch here.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from daguerre.data import alternatives, skipped
from daguerre.data.images import kinds
from daguerre.data.images.headers import Undecodable
from daguerre.data.index.file import About, ShardIndex, file_digest, sample_ids
from daguerre.data.table import images, verbatim
from daguerre.data.table.columns import ID, Columns, check, is_text
from daguerre.data.table.files import Damage, Part, Tables, Unreadable, listed
from daguerre.data.table.images import Lacking
from daguerre.data.table.metadata import Gathered, text_of
from daguerre.data.table.pairs import preferred
from daguerre.data.table.parquet import ParquetTables
from daguerre.data.table.verbatim import Finder
from daguerre.errors import UserError
from daguerre.storage import local_files
from daguerre.storage.file_cache import ShardCache
from daguerre.storage.location import WEB, Location
from daguerre.types import REFERENCES


@dataclass(frozen=True)
class Builder:
    """Builds the index of a table; travels to other processes."""

    tables: Tables
    columns: Columns
    first: pa.Schema
    """Of the first table, which the others are like."""
    formats: tuple[str, ...]
    kind: str
    cache: ShardCache

    def __call__(self, location: Location) -> ShardIndex:
        """Reads the whole table, and the headers of images that are here. UserError where it is no table."""
        return self.cache.using(location, lambda file: self._built(location, file))

    def _built(self, location: Location, file: Path) -> ShardIndex:
        schema = read_schema(self.tables, file, location)
        check(schema, self.columns, self.first, location.name)
        counts: skipped.Counts = {}
        gathered = Gathered(tuple(self.columns.metadata(schema)), self.tables.typed)
        stat, kept = file.stat(), _Kept(gathered, self.columns.further)
        base = base_of(location)
        names = self.columns.read(schema)
        try:
            with verbatim.finder(file) as finder:
                for part in self.tables.parts(file, names, self.columns.image, location.name):
                    if isinstance(part, Damage):
                        skipped.add(counts, part.reason, part.where)
                        counts[part.reason]["count"] += part.rows - 1
                    else:
                        kept.take(part, list(self._rows(part, base, location.name, finder, counts)))
        except Unreadable as error:
            raise unreadable(location, error) from error
        digest = file_digest(file)
        table = kept.table(digest)
        found = "pieces" in table.column_names and all(table["pieces"].to_pylist())
        decoded = [name for name in names if name != self.columns.image or not found]
        if isinstance(self.tables, ParquetTables) and (slow := self.tables.slow(file, decoded)):
            skipped.add(counts, _SLOW, f"{location.name}: {slow}", kept=True)
        not_kept = tuple(name for name in kept.metadata.names if name in kept.metadata.not_kept)
        fields = tuple(name for name in kept.metadata.names if name not in not_kept)
        loose = {"loose": True} if is_text(schema.field(self.columns.image).type) else {}
        about = About(
            self.kind, location.name, stat.st_size, digest, version(location, file), counts, (), fields, not_kept, loose
        )
        return ShardIndex(table, about)

    def _rows(self, part: Part, base: str, where: str, finder: Finder, counts: skipped.Counts) -> Iterator[_Row]:
        """The rows of a part that can be trained on; the others are counted."""
        looks = isinstance(self.tables, ParquetTables)
        if part.images_from is not None:
            finder.cursor = part.images_from
        wanted = [name for name in part.batch.schema.names if name in self.columns.examined]
        lists = [listed(part.batch.column(name)) for name in wanted]
        for i, cells in enumerate(zip(*lists, strict=True)):
            stored = dict(zip(wanted, cells, strict=True))
            try:
                row = in_order(stored, self.columns)
                height, width = images.size(row[self.columns.image], base, self.formats)
                texts = texts_of(row, self.columns)
                beside = self._beside(row, base, (height, width))
            except Undecodable as error:
                at = f"row {part.rows[i]}" if part.spans is None else f"line {part.spans[i, 2]}"
                skipped.add(counts, str(error), f"{where} {at}", damage=not isinstance(error, Lacking))
                continue
            if self.columns.size and not height:
                height, width = (_pixels(row[name]) for name in self.columns.size)
            held = stored[self.columns.image]
            pieces = finder.ranges(images.stored(held)) if looks and images.is_held(held) else b""
            yield _Row(i, height, width, digest_of(row[self.columns.image], texts, beside), beside, pieces)

    def _beside(self, row: Mapping[str, Any], base: str, size: tuple[int, int]) -> dict[str, Any]:
        """The further images of a row. `Undecodable` where one that is here cannot be used."""
        found = images_of(row, self.columns)
        for name, cell in found.items():
            with kinds.named(name):
                own = images.size(cell, base, self.formats)
                if all(size) and all(own):
                    kinds.check_scene(name, own, size)
        return found


_SLOW = "kept, but slow to read in a shuffled order (write smaller row groups, or pack it: `daguerre data pack`)"


def read_schema(tables: Tables, file: Path, location: Location) -> pa.Schema:
    """The columns of a table. UserError for another file."""
    try:
        return tables.schema(file)
    except Unreadable as error:
        raise unreadable(location, error) from error


def unreadable(location: Location, error: Unreadable) -> UserError:
    """For a file that is no table, or is damaged as a whole."""
    return UserError(
        f"data.path: {location.name} cannot be read as a table: {error}. Download or write it again, or remove it "
        "from data.path",
        code="damaged",
        setting="data.path",
    )


def version(location: Location, file: Path) -> str:
    """Tells whether a table here was touched; "" for one that is far away."""
    return local_files.version(file) if location.local else ""


def base_of(location: Location) -> str:
    """The folder of a table, or the address of it, where relative paths start."""
    if location.local:
        return str(location.local.absolute().parent)
    address = location.url.partition("?")[0] if location.scheme in WEB else location.url
    return address.rpartition("/")[0] + "/"


def in_order(row: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """A row as it is stored, with the image that people prefer in the column of the image. `Lacking` for a tie."""
    return dict(row) if columns.pair is None else preferred(row, *columns.pair)


def texts_of(row: Mapping[str, Any], columns: Columns) -> dict[str, str]:
    """{caption field: text} of those that have text. `Lacking` where none has and one is needed."""
    texts: dict[str, str] = {}
    unknown = False
    for name, column in columns.captions:
        value = row.get(column)
        if column in columns.labels and value not in (None, ""):
            try:
                value = columns.labels[column].text(value)
            except Undecodable:
                value, unknown = None, True
        found = alternatives.of_value(name, value)
        if not found and isinstance(value, str) and (trouble := alternatives.trouble(value)):
            raise Lacking(trouble)
        texts |= found
    if not texts and columns.captions:
        listed = ", ".join(repr(column) for _, column in columns.captions)
        raise Lacking(f"{'class label without a name' if unknown else 'no caption'} (column {listed})")
    return texts


def images_of(row: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """{name: cell} of the further images of a row."""
    found: dict[str, Any] = {}
    for name, column in columns.beside:
        cells = images.several(row.get(column)) if name in REFERENCES else [row.get(column)]
        names = REFERENCES[REFERENCES.index(name) :] if name in REFERENCES else (name,)
        if len(cells) > len(names):
            raise Undecodable(f"{len(cells)} reference images: at most {len(names)} are read")
        found |= {of: cell for of, cell in zip(names, cells, strict=False) if images.is_there(cell)}
    return found


def digest_of(image: Any, texts: Mapping[str, str], beside: Mapping[str, Any]) -> int:
    """xxh3_64 of what the table holds of a sample: its images (or where they are), then its captions."""
    digest = xxhash.xxh3_64(images.stored(image))
    for name, image in beside.items():
        digest.update(b"\0" + name.encode() + b"\0" + images.stored(image))
    for text in texts.values():
        digest.update(b"\0" + text.encode("utf-8", "surrogateescape"))
    return digest.intdigest()


def _pixels(value: Any) -> int:
    """A side from a column; 0 where it says nothing."""
    try:
        side = int(float(value))
    except (TypeError, ValueError, OverflowError):
        return 0
    return side if 0 < side < 2**31 else 0


class _Row(NamedTuple):
    """A row that can be trained on."""

    position: int
    """In its part."""
    height: int
    width: int
    digest: int
    beside: Container[str]
    """Names of its further images."""
    pieces: bytes
    """Where its image stands in the file; nothing if that is not known."""


@dataclass
class _Kept:
    """The rows that are kept, part by part."""

    metadata: Gathered
    beside: tuple[str, ...]
    """Names of the further images that rows may have."""
    parts: list[pa.Table] = field(default_factory=list)

    def take(self, part: Part, rows: Sequence[_Row]) -> None:
        positions = np.array([row.position for row in rows], np.int64)
        batch = part.batch.select([n for n in part.batch.schema.names if n in self.metadata.names or n == ID])
        batch = batch.take(pa.array(positions))
        self.metadata.take(batch)
        columns = {
            "id": _given(batch.column(ID)) if ID in batch.schema.names else np.full(len(rows), -1),
            "height": pa.array([row.height for row in rows], pa.int32()),
            "width": pa.array([row.width for row in rows], pa.int32()),
            "digest": pa.array([row.digest for row in rows], pa.uint64()),
            "row": pa.array(part.rows[positions], pa.int64()),
        }
        if part.spans is not None:
            columns |= {"length": part.spans[positions, 1].astype(np.int32), "line": part.spans[positions, 2]}
        columns |= {f"i:{name}": pa.array([name in row.beside for row in rows], pa.bool_()) for name in self.beside}
        columns["pieces"] = pa.array([row.pieces for row in rows], pa.binary())
        self.parts.append(pa.table(columns))

    def table(self, digest: str) -> pa.Table:
        if not self.parts:
            self.take(Part(np.zeros(0, np.int64), pa.record_batch({})), [])
        table = pa.concat_tables(self.parts).combine_chunks()
        if not any(table["pieces"].to_pylist()):
            table = table.drop_columns("pieces")
        given, rows = table["id"].to_numpy(), table["row"].to_numpy()
        ids = pa.array(np.where(given >= 0, given, sample_ids(digest, rows)))
        table = table.set_column(0, "id", ids)
        for name, column in self.metadata.columns().items():
            table = table.append_column(name, column)
        return table


def _given(column: pa.Array) -> np.ndarray:
    """Ids [n] int64 of a column; -1 where it holds none."""
    text = text_of(column.cast(pa.string()))
    whole = pc.if_else(pc.match_substring_regex(text, r"^\d{1,18}$"), text, None).cast(pa.int64())
    return whole.fill_null(-1).to_numpy()
