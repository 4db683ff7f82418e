"""Rows of a cache: features by key, in safetensors files of one stacked tensor each.

A file holds `keys` [n, 16] uint8, `digests` [n] uint64 (xxh3_64 of each row) and, last, `rows` [n, stride] uint8: the
values of the fields that its metadata names, one after the other. It never changes, and is named by a digest of all
that stands before the rows; so the name proves the digests, and these prove the rows. A row is one read.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import xxhash
from safetensors.numpy import save

from daguerre.data.images.headers import Undecodable
from daguerre.regular import Irregular
from daguerre.storage import bucket
from daguerre.storage import io as storage_io
from daguerre.storage.location import Location

SUFFIX = ".safetensors"
KEY_BYTES = 16
LOST = "cached row that is damaged or gone"
MENDED = "cached row that was damaged or gone, and was encoded again"
_OPEN_SECONDS = 60.0
_LENGTH_BYTES = 8
_READ_BYTES = 1 << 25

BFLOAT16 = np.dtype("V2")
"""Stands for bfloat16, which numpy does not have: two bytes that it does not look into."""

GONE = (storage_io.Mismatch, storage_io.Missing, FileNotFoundError, IsADirectoryError, Irregular)
"""Errors for a file that is another one now, is not there, or is a folder, a pipe or a link to itself."""

Row = Mapping[str, np.ndarray]
"""Features by name, without a leading dim."""


class Field(NamedTuple):
    """One feature of all rows of a file."""

    name: str
    dtype: str
    """As numpy calls it."""
    shape: tuple[int, ...]


class Head(NamedTuple):
    """The part of a file before its rows."""

    keys: np.ndarray
    """[n] S16."""
    digests: np.ndarray
    """[n] uint64."""
    start: int
    """Byte at which the rows start."""
    dtype: np.dtype
    """Of a row: its fields one after the other."""


class Lost(Undecodable):
    """A row that is not there, or is not what was written: it has to be encoded again."""

    def __init__(self) -> None:
        super().__init__(LOST)


def numbers(array: np.ndarray) -> np.ndarray:
    """The values of a feature as float64."""
    if array.dtype == BFLOAT16:  # the upper half of a float32
        array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def key(*parts: bytes) -> bytes:
    """16 bytes that tell contents apart (xxh3_128)."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def files(folder: str, suffix: str) -> list[str]:
    """Names of the files of a folder of the cache, local or in a store; none where there is no folder."""
    location = Location(folder)
    if location.local is None:
        found = (each.url.removeprefix(f"{folder}/") for each in storage_io.listing(f"{folder}/"))
        return [name for name in found if name.endswith(suffix)]
    return sorted(path.name for path in location.local.glob(f"[!.]*{suffix}"))


def remove(folder: str, names: Sequence[str]) -> None:
    """Deletes files of a folder of the cache."""
    if (local := Location(folder).local) is None:
        bucket.Prefix(folder).delete(names)
        return
    for name in names:
        (local / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class Rows:
    """The rows of one encoder. Travels to workers as names; keys are read where they are used first."""

    folder: str
    shards: tuple[str, ...]

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def found(cls, folder: str) -> "Rows":
        """The rows of a folder as it is now."""
        return cls(folder, tuple(files(folder, SUFFIX)))

    def location(self, shard: str) -> Location:
        return Location(f"{self.folder}/{shard}")

    @cached_property
    def heads(self) -> dict[str, Head]:
        """The head of each whole file; the names of the others are `damaged`."""
        found = {shard: self._head(shard) for shard in self.shards}
        return {shard: head for shard, head in found.items() if head is not None}

    @property
    def damaged(self) -> list[str]:
        """Files that are not what their names say."""
        return [shard for shard in self.shards if shard not in self.heads]

    def _head(self, shard: str) -> Head | None:
        name, _, length = shard.removesuffix(SUFFIX).partition("-")
        try:
            size_bytes = storage_io.size(self.location(shard)).bytes
            if not (length.isascii() and length.isdecimal() and _LENGTH_BYTES < int(length) <= size_bytes):
                return None
            data = storage_io.read(
                self.location(shard), 0, int(length), lambda data: xxhash.xxh3_128_hexdigest(data) == name
            )
            head = parsed(data)
            whole = head.start + len(head.keys) * head.dtype.itemsize
            return head if size_bytes == whole else None
        except GONE:
            return None

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """All keys [n] S16 in order, and [n, 2] where: shard and row."""
        heads = list(self.heads.values())
        keys = np.concatenate([np.empty(0, f"S{KEY_BYTES}"), *(head.keys for head in heads)])
        counts = [len(head.keys) for head in heads]
        rows = np.concatenate([np.empty(0, np.int64), *(np.arange(count) for count in counts)])
        order = np.argsort(keys, kind="stable")
        return keys[order], np.stack([np.repeat(np.arange(len(heads)), counts), rows], axis=1)[order]

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(self.heads)

    @property
    def keys(self) -> np.ndarray:
        """All keys [n] S16, in order."""
        return self._places[0]

    def has(self, wanted: Sequence[bytes]) -> np.ndarray:
        """[n] bool: whether there is a row of each key. Its bytes are not looked at: see `sound`."""
        asked = np.array(wanted, dtype=f"S{KEY_BYTES}")
        if not len(self.keys):
            return np.zeros(len(asked), dtype=bool)
        place = np.minimum(np.searchsorted(self.keys, asked), len(self.keys) - 1)
        return self.keys[place] == asked

    def sound(self, wanted: Sequence[bytes]) -> np.ndarray:
        """[n] bool: whether there is a row of each key that is what was written. The first call reads all rows."""
        return np.isin(np.array(wanted, dtype=f"S{KEY_BYTES}"), self._keys_of(damaged=False))

    def lost(self) -> set[bytes]:
        """The keys of which every row is damaged. The first call reads all rows."""
        damaged = self._keys_of(damaged=True)
        return {bytes(key).ljust(KEY_BYTES, b"\0") for key in np.setdiff1d(damaged, self._keys_of(damaged=False))}

    def _keys_of(self, damaged: bool) -> np.ndarray:
        each = [head.keys[self.damaged_rows[shard] == damaged] for shard, head in self.heads.items()]
        return np.concatenate([np.empty(0, f"S{KEY_BYTES}"), *each])

    @cached_property
    def damaged_rows(self) -> dict[str, np.ndarray]:
        """[n] bool of each whole file: the rows that are not what was written. Reads them all."""
        return {shard: self._damaged_rows(shard, head) for shard, head in self.heads.items()}

    def _damaged_rows(self, shard: str, head: Head) -> np.ndarray:
        damaged, stride = np.zeros(len(head.keys), dtype=bool), head.dtype.itemsize
        each = max(1, _READ_BYTES // max(1, stride))
        for first in range(0, len(damaged), each):
            count = min(each, len(damaged) - first)
            data = memoryview(storage_io.read(self.location(shard), head.start + first * stride, count * stride))
            for row in range(count):
                if xxhash.xxh3_64_intdigest(data[row * stride : (row + 1) * stride]) != head.digests[first + row]:
                    damaged[first + row] = not self._is_whole(shard, first + row)
        return damaged

    def _is_whole(self, shard: str, row: int) -> bool:
        try:
            self.row(shard, row)
        except Lost:
            return False
        return True  # it was damaged in transit alone

    def shapes(self, key: bytes) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of each feature of a key, as its file says; the row itself is not read. `Lost` where there is
        none."""
        for shard, _ in self._found(key):
            told = self.heads[shard].dtype
            return {name: (told[name].shape, told[name].base.str) for name in told.names or ()}
        raise Lost

    def read(self, key: bytes) -> Row:
        """The row of a key. OSError for a fault that may pass; `Lost` where no whole row exists."""
        for shard, row in self._found(key):
            try:
                return self.row(shard, row)
            except Lost:
                continue  # one that was encoded again may be in another file
        raise Lost

    def _found(self, key: bytes) -> Iterator[tuple[str, int]]:
        """The files and rows of a key."""
        keys, where = self._places
        asked = np.array(key, f"S{KEY_BYTES}")  # as those are, without zeros at its end
        for place in range(int(np.searchsorted(keys, asked)), int(np.searchsorted(keys, asked, side="right"))):
            shard, row = where[place].tolist()
            yield self._names[shard], row

    def row(self, shard: str, row: int) -> Row:
        """A row of a file. OSError; `Lost` where it is damaged, or its file is gone."""
        head = self.heads[shard]
        digest, stride = int(head.digests[row]), head.dtype.itemsize
        try:
            data = storage_io.read(
                self.location(shard),
                head.start + row * stride,
                stride,
                lambda data: xxhash.xxh3_64_intdigest(data) == digest,
            )
        except GONE as error:
            raise Lost from error
        return unpacked(data, head.dtype)


def parsed(data: bytes) -> Head:
    """The head of a file from its first bytes."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    base = _LENGTH_BYTES + length

    def cut(name: str) -> bytes:
        first, last = header[name]["data_offsets"]
        return data[base + first : base + last]

    told = np.dtype(
        [(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(header["__metadata__"]["fields"])]
    )
    start = base + header["rows"]["data_offsets"][0]
    return Head(np.frombuffer(cut("keys"), f"S{KEY_BYTES}"), np.frombuffer(cut("digests"), np.uint64), start, told)


def unpacked(data: bytes, told: np.dtype) -> Row:
    """The features of a row, over its memory."""
    row = np.frombuffer(data, told)
    return {name: row[name].reshape(told[name].shape) for name in told.names or ()}


@dataclass
class Writer:
    """Collects rows, and writes them as files; those of other shapes in files of their own."""

    folder: str
    shard_bytes: float
    now: Callable[[], float] = time.monotonic
    rows: int = 0
    """Rows that were written."""
    size_bytes: int = 0
    _waiting: dict[tuple[Field, ...], list[tuple[bytes, bytes]]] = field(default_factory=dict)
    _since: float = field(default=0.0)

    def add(self, key: bytes, row: Row) -> None:
        """Takes a row. OSError or StoreError where a file is due that cannot be written."""
        told = tuple(Field(name, row[name].dtype.str, row[name].shape) for name in sorted(row))
        if not any(self._waiting.values()):
            self._since = self.now()
        waiting = self._waiting.setdefault(told, [])
        waiting.append((key, b"".join(np.ascontiguousarray(row[each.name]).tobytes() for each in told)))
        if len(waiting) * len(waiting[-1][1]) >= self.shard_bytes:
            self._write(told)
        elif self.now() - self._since > _OPEN_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes all that waits."""
        for told in list(self._waiting):
            self._write(told)
        self._since = self.now()

    def _write(self, told: tuple[Field, ...]) -> None:
        waiting = self._waiting.pop(told)
        if not waiting:
            return
        name, data = encoded(waiting, told)
        storage_io.write(f"{self.folder}/{name}", data)
        self.rows += len(waiting)
        self.size_bytes += len(data)


def encoded(rows: Sequence[tuple[bytes, bytes]], told: Sequence[Field]) -> tuple[str, bytes]:
    """Name and bytes of a file of these rows."""
    tensors: dict[str, np.ndarray] = {
        "keys": np.frombuffer(b"".join(key for key, _ in rows), np.uint8).reshape(len(rows), KEY_BYTES),
        "digests": np.array([xxhash.xxh3_64_intdigest(data) for _, data in rows], np.uint64),
        "rows": np.frombuffer(b"".join(data for _, data in rows), np.uint8).reshape(len(rows), -1),
    }
    data = save(tensors, {"fields": json.dumps(told)})  # widest type first, then by name: rows are last
    length = len(data) - tensors["rows"].nbytes
    return f"{xxhash.xxh3_128_hexdigest(data[:length])}-{length}{SUFFIX}", data
