"""The index of one table: which of its rows can be trained on, their sizes, digests and metadata, and what is left out.

Rows come from `data/table/files.py` and `data/table/csv.py`, pictures from `data/table/images.py`; how index files
are kept is `data/index/cache.py`. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from daguerre.data import skipped
from daguerre.data.images import kinds
from daguerre.data.images.headers import Undecodable
from daguerre.data.index.file import About, ShardIndex, file_digest, sample_ids
from daguerre.data.table import images, verbatim
from daguerre.data.table.columns import ID, Columns, check, is_text
from daguerre.data.table.files import Damage, Part, Tables, Unreadable, listed
from daguerre.data.table.images import Lacking
from daguerre.data.table.metadata import Gathered, text_of
from daguerre.data.table.parquet import ParquetTables
from daguerre.data.table.verbatim import Finder
from daguerre.errors import UserError
from daguerre.storage.file_cache import ShardCache
from daguerre.storage.location import WEB, Place


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

    def __call__(self, place: Place) -> ShardIndex:
        """Reads the whole table, and the headers of pictures that are here. UserError where it is no table."""
        file = place.local or self.cache.path(place, None)
        schema = read_schema(self.tables, file, place)
        check(schema, self.columns, self.first, place.name)
        counts: skipped.Counts = {}
        gathered = Gathered(tuple(self.columns.metadata(schema)), self.tables.typed)
        stat, kept = file.stat(), _Kept(gathered, beside=tuple(name for name, _ in self.columns.beside))
        base = base_of(place)
        names = self.columns.read(schema)
        try:
            with verbatim.finder(file) as finder:
                for part in self.tables.parts(file, names, self.columns.image, place.name):
                    if isinstance(part, Damage):
                        _count(counts, part.reason, part.where, part.rows)
                    else:
                        kept.take(part, self._rows(part, base, place.name, finder, counts))
        except Unreadable as error:
            raise unreadable(place, error) from error
        whole = all(kept.pieces) and any(kept.pieces)
        if slow := self.tables.slow(file, [name for name in names if name != self.columns.image or not whole]):
            skipped.add(counts, _SLOW, f"{place.name}: {slow}", kept=True)
        digest = file_digest(file)
        table = kept.table(digest)
        not_kept = tuple(name for name in kept.metadata.names if name in kept.metadata.not_kept)
        fields = tuple(name for name in kept.metadata.names if name not in not_kept)
        loose = {"loose": True} if is_text(schema.field(self.columns.image).type) else {}
        about = About(
            self.kind, place.name, stat.st_size, digest, version(place, file), counts, (), fields, not_kept, loose
        )
        return ShardIndex(table, about)

    def _rows(
        self, part: Part, base: str, where: str, finder: Finder, counts: skipped.Counts
    ) -> Iterator[tuple[tuple[int, ...], bytes]]:
        """(row of the part, and what `_Kept.looked` has of it) of each that can be trained on; the pieces of its
        picture."""
        looks = isinstance(self.tables, ParquetTables)
        if part.pictures_from is not None:
            finder.cursor = part.pictures_from
        wanted = [name for name in part.batch.schema.names if name in self.columns.looked_at]
        lists = [listed(part.batch.column(name)) for name in wanted]
        for i, cells in enumerate(zip(*lists, strict=True)):
            row = dict(zip(wanted, cells, strict=True))
            try:
                height, width = images.size(row[self.columns.image], base, self.formats)
                texts = texts_of(row, self.columns)
                beside = self._beside(row, base, (height, width))
            except Undecodable as error:
                place = f"row {part.rows[i]}" if part.spans is None else f"line {part.spans[i, 2]}"
                skipped.add(counts, str(error), f"{where} {place}", damage=not isinstance(error, Lacking))
                continue
            if self.columns.size and not height:
                height, width = (_pixels(row[name]) for name in self.columns.size)
            held = row[self.columns.image]
            pieces = finder.places(images.stored(held)) if looks and images.is_held(held) else b""
            there = sum(1 << place for place, (name, _) in enumerate(self.columns.beside) if name in beside)
            yield (i, height, width, digest_of(held, texts, beside), there), pieces

    def _beside(self, row: Mapping[str, Any], base: str, size: tuple[int, int]) -> dict[str, Any]:
        """The images that a row has beside its picture. `Undecodable` where one that is here cannot be used."""
        found = images_of(row, self.columns)
        for name, cell in found.items():
            with kinds.named(name):
                own = images.size(cell, base, self.formats)
                if all(size) and all(own):
                    kinds.refuse_other_shape(own, size)
        return found


_SLOW = "kept, but slow to read in a drawn order (write smaller row groups, or pack it: `daguerre data pack`)"


def read_schema(tables: Tables, file: Path, place: Place) -> pa.Schema:
    """The columns of a table. UserError where it is none."""
    try:
        return tables.schema(file)
    except Unreadable as error:
        raise unreadable(place, error) from error


def unreadable(place: Place, error: Unreadable) -> UserError:
    """For a file that is no table, or is damaged as a whole."""
    return UserError(
        f"data.path: {place.name} cannot be read as a table: {error}. Fetch or write it again, or leave it out of "
        "data.path",
        code="damaged",
        setting="data.path",
    )


def version(place: Place, file: Path) -> str:
    """Tells whether a table here was changed; "" for one that is far away."""
    return str(file.stat().st_mtime_ns) if place.local else ""


def base_of(place: Place) -> str:
    """The folder of a table, or the address of it, where relative paths start."""
    if place.local:
        return str(place.local.absolute().parent)
    address = place.url.partition("?")[0] if place.scheme in WEB else place.url
    return address.rpartition("/")[0] + "/"


def texts_of(row: Mapping[str, Any], columns: Columns) -> dict[str, str]:
    """{caption field: text} of those that have text. `Lacking` where none has and one is needed."""
    texts, unknown = {}, False
    for name, column in columns.captions:
        value = row.get(column)
        if column in columns.labels and value not in (None, ""):
            try:
                value = columns.labels[column].text(value)
            except Undecodable:
                value, unknown = None, True
        if isinstance(value, str) and value.strip():
            texts[name] = value.strip()
    if not texts and columns.captions:
        listed = ", ".join(repr(column) for _, column in columns.captions)
        raise Lacking(f"{'class label without a name' if unknown else 'no caption'} (column {listed})")
    return texts


def images_of(row: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """{name: cell} of the images that a row has beside its picture."""
    return {name: row[column] for name, column in columns.beside if images.is_there(row.get(column))}


def digest_of(picture: Any, texts: Mapping[str, str], beside: Mapping[str, Any]) -> int:
    """xxh3_64 of what the table holds of a sample: its images (or where they are), then its captions."""
    digest = xxhash.xxh3_64(images.stored(picture))
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


def _count(counts: skipped.Counts, reason: str, where: str, number: int) -> None:
    skipped.add(counts, reason, where)
    counts[reason]["count"] += number - 1


@dataclass
class _Kept:
    """The rows that are kept, part by part."""

    metadata: Gathered
    numbers: list[np.ndarray] = field(default_factory=list)
    spans: list[np.ndarray] = field(default_factory=list)
    looked: list[np.ndarray] = field(default_factory=list)
    """[n, 4] uint64: height, width, digest, and which images are beside the picture: bit i for the i-th column."""
    beside: tuple[str, ...] = ()
    """Names of those columns."""
    ids: list[np.ndarray] = field(default_factory=list)
    """[n] int64: what the column of ids says; -1: nothing."""
    pieces: list[bytes] = field(default_factory=list)

    def take(self, part: Part, rows: Iterator[tuple[tuple[int, ...], bytes]]) -> None:
        """Keeps some rows of a part."""
        taken = list(rows)
        self.pieces.extend(pieces for _, pieces in taken)
        looked = np.array([row for row, _ in taken], dtype=np.uint64).reshape(-1, 5)
        which = looked[:, 0].astype(np.int64)
        self.numbers.append(part.rows[which])
        self.looked.append(looked[:, 1:])
        if part.spans is not None:
            self.spans.append(part.spans[which])
        batch = part.batch.select([n for n in part.batch.schema.names if n in self.metadata.names or n == ID])
        batch = batch.take(pa.array(which))
        self.metadata.take(batch)
        if ID in batch.schema.names:
            self.ids.append(_given(batch.column(ID)))

    def table(self, digest: str) -> pa.Table:
        """The index's columns."""
        numbers = np.concatenate([*self.numbers, np.zeros(0, np.int64)]).astype(np.int64)
        looked = np.concatenate([*self.looked, np.zeros((0, 4), np.uint64)])
        columns: dict[str, Any] = {
            "id": self._ids(digest, numbers),
            "height": looked[:, 0].astype(np.int32),
            "width": looked[:, 1].astype(np.int32),
            "digest": looked[:, 2],
            "row": numbers,
        }
        if self.spans:
            spans = np.concatenate(self.spans)
            columns |= {"length": spans[:, 1].astype(np.int32), "line": spans[:, 2]}
        columns |= {f"i:{name}": looked[:, 3] >> place & 1 == 1 for place, name in enumerate(self.beside)}
        if any(self.pieces):
            columns["pieces"] = pa.array(self.pieces, pa.binary())
        return pa.table({**columns, **self.metadata.columns()})

    def _ids(self, digest: str, numbers: np.ndarray) -> np.ndarray:
        """What the column of ids says, where there is one, else by the table's digest and the row."""
        ids = sample_ids(digest, numbers)
        given = np.concatenate(self.ids) if self.ids else np.full(len(ids), -1)
        return np.where(given >= 0, given, ids)


def _given(column: pa.Array) -> np.ndarray:
    """Ids [n] int64 of a column; -1 where it holds none."""
    text = text_of(column.cast(pa.string()))
    whole = pc.if_else(pc.match_substring_regex(text, r"^\d{1,18}$"), text, None).cast(pa.int64())
    return whole.fill_null(-1).to_numpy()
