"""Facts of samples that a cache knows without reading them: digest and size of the image, captions, what is broken.

They are noted by sample and stamp (`StampedSource`), in files that never change and are added to: where a stamp is
another one, the sample is read again, and only what is new of it is encoded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from daguerre.data.cached import rows
from daguerre.data.index.file import About, BadIndex, ShardIndex, decoded, encoded
from daguerre.data.settings import SourceSettings
from daguerre.data.source import Source, StampedSource
from daguerre.storage import io as storage_io
from daguerre.storage.location import Location
from daguerre.types import IMAGE

FOLDER = "samples"
SUFFIX = ".index"
KIND = "cached samples"
_COLUMNS = {
    "id": pa.int64(),
    "stamp": pa.uint64(),
    "image": pa.binary(),
    "height": pa.int32(),
    "width": pa.int32(),
    "broken": pa.string(),
    "texts": pa.string(),
    "further": pa.string(),
}


class Picture(NamedTuple):
    """A further image of a sample as it was read."""

    digest: bytes
    """Of its bytes (16)."""
    height: int
    """Upright, in pixels."""
    width: int


class Fact(NamedTuple):
    """One sample as it was read."""

    image: bytes
    """Digest of the image's bytes (16); empty where it cannot be used."""
    height: int
    """Upright, in pixels."""
    width: int
    texts: Mapping[str, str]
    broken: str
    """Reason for which it cannot be used; else empty."""
    further: Mapping[str, Picture] = MappingProxyType({})
    """Further images by name, of those that are encoded."""

    @property
    def pictures(self) -> dict[str, Picture]:
        """All its images by name."""
        return {IMAGE: Picture(self.image, self.height, self.width), **self.further}


def to_json(further: Mapping[str, Picture]) -> str:
    """Further images as text, for a column."""
    return json.dumps({name: [one.digest.hex(), one.height, one.width] for name, one in further.items()})


def from_json(text: str | None) -> dict[str, Picture]:
    """The inverse of `to_json`; files of earlier versions have no such column."""
    return {name: Picture(bytes.fromhex(one[0]), *one[1:]) for name, one in json.loads(text or "{}").items()}


def stamps(source: Source, settings: SourceSettings, further: Sequence[str] = ()) -> np.ndarray | None:
    """[N] uint64 for the samples of a source as these settings read it, with these further images; None where it has to
    be read to know."""
    found = source.stamps() if isinstance(source, StampedSource) else None
    if found is None:
        return None
    own = {name for name in type(settings).model_fields if name not in SourceSettings.model_fields} | {"formats"}
    told = settings.model_dump(mode="json", include=own - {"generate"})
    told |= {"further images": sorted(further)} if further else {}
    own_stamp = xxhash.xxh3_64_intdigest(json.dumps(told, sort_keys=True).encode())
    salted: np.ndarray = np.bitwise_xor(found, np.uint64(own_stamp))
    return salted


@dataclass
class Facts:
    """All samples that a cache lists."""

    folder: str
    """Of the cache."""
    _new: dict[tuple[int, int], Fact] = field(default_factory=dict)

    def files(self) -> list[str]:
        """Names of the files that are there."""
        return rows.files(f"{self.folder}/{FOLDER}", SUFFIX)

    @cached_property
    def _noted(self) -> pa.Table:
        place = f"{self.folder}/{FOLDER}"
        tables = [pa.table({name: pa.array([], kind) for name, kind in _COLUMNS.items()})]
        for name in self.files():
            location = Location(f"{place}/{name}")
            try:
                data = storage_io.read(location, 0, storage_io.size(location).bytes, twice=True)
                if xxhash.xxh3_128_hexdigest(data) != name.removesuffix(SUFFIX):
                    continue
                table = decoded(pa.py_buffer(data), Path(name)).whole()
                if "further" not in table.column_names:  # of an earlier version
                    table = table.append_column("further", pa.nulls(table.num_rows, pa.string()))
                tables.append(table)
            except (BadIndex, *rows.GONE):
                continue  # its samples are read again
        return pa.concat_tables([table.select(list(_COLUMNS)).cast(pa.schema(_COLUMNS)) for table in tables])

    @cached_property
    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        keys = _keys(self._noted["id"].to_numpy(), self._noted["stamp"].to_numpy())
        order = np.argsort(keys, kind="stable")
        return keys[order], order

    def places(self, ids: np.ndarray, stamps: np.ndarray) -> np.ndarray:
        """[n] int64: the row of each sample among those noted; -1 where no sample has this stamp."""
        keys, order = self._order
        if not len(keys):
            return np.full(len(ids), -1, dtype=np.int64)
        asked = _keys(ids, stamps)
        place = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
        return np.where(keys[place] == asked, order[place], -1)

    def noted(self, places: np.ndarray) -> list[Fact]:
        """The rows of `places`, none of which is -1."""
        rows = self._noted.take(pa.array(places))
        columns = (rows[name].to_pylist() for name in list(_COLUMNS)[2:])
        return [
            Fact(image, height, width, json.loads(texts), broken, from_json(further))
            for image, height, width, broken, texts, further in zip(*columns, strict=True)
        ]

    def add(self, sample_id: int, stamp: int, fact: Fact) -> None:
        self._new[sample_id, stamp] = fact

    def flush(self) -> None:
        """Writes what was added."""
        if not self._new:
            return
        made: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        for (sample_id, stamp), fact in self._new.items():
            values = (sample_id, stamp, *fact[:3], fact.broken, json.dumps(fact.texts), to_json(fact.further))
            for column, value in zip(made.values(), values, strict=True):
                column.append(value)
        table = pa.table({name: pa.array(values, _COLUMNS[name]) for name, values in made.items()})
        data = encoded(ShardIndex(table, About(KIND, "", 0, "0" * 32)))
        storage_io.write(f"{self.folder}/{FOLDER}/{xxhash.xxh3_128_hexdigest(data)}{SUFFIX}", data)
        self._new.clear()


def _keys(ids: np.ndarray, stamps: np.ndarray) -> np.ndarray:
    """[n] of 16 bytes: sample and stamp."""
    pairs = np.stack([ids.astype("<i8").view("<u8"), stamps.astype("<u8")], axis=1)
    return np.ascontiguousarray(pairs).view([("id", "<u8"), ("stamp", "<u8")]).reshape(-1)
