"""The index file of one shard: what planning and reading need to know of it, so that it is read through only once.

An Arrow stream with digests behind it, memory-mapped: only columns that are asked for are read, and checked. Finding,
making and joining the indexes of a data set is `data/index/cache.py`.
"""

import json
import math
import secrets
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from pyarrow import ipc

from daguerre import digests
from daguerre.data.skipped import SkipReport
from daguerre.errors import UserError
from daguerre.fresh import hidden, naming
from daguerre.regular import Irregular
from daguerre.storage import local_files
from daguerre.unicode import mended

FORMAT = 2
TEXT_LIMIT = 63
"""Longest text that is kept for filters, in characters: one less than a SHA-256 in hex, which img2dataset gives every
sample, nobody filters by, and would double an index."""
FIELD_LIMIT = 512
"""Most metadata fields of a shard that are kept: made-up names must not fill the memory."""
_KEY = b"daguerre"
_END = struct.Struct("<QQ")
"""How an index file ends: the length of the digests before it, and the digest of those."""


class BadIndex(UserError):
    """A file that is no index, is damaged, or of another version. Where this shows at once, the index is made again."""

    code = "damaged"


@dataclass(frozen=True)
class About:
    """Facts of an index file about its shard as a whole."""

    kind: str
    """What the shard was read as, such as "webdataset"; an index of another kind is not used."""
    shard: str
    """Name of the shard, for messages."""
    shard_bytes: int
    shard_digest: str
    """xxh3_128 of the whole file, hex."""
    version: str = ""
    """Time of the file's last change, or its ETag, when it was indexed; for people."""
    left_out: SkipReport = field(default_factory=dict)
    damage: tuple[tuple[int, int], ...] = ()
    """Byte ranges [start, end) in which the number of samples is not known; start = end: the shard is cut off there."""
    fields: tuple[str, ...] = ()
    """Metadata that is kept for filters, in columns `n:NAME` (numbers) and `s:NAME` (texts)."""
    not_kept: tuple[str, ...] = ()
    """Metadata that is there but cannot be filtered by: long texts, lists, objects."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """What else the kind keeps a shard."""


@dataclass(frozen=True)
class ShardIndex:
    """The samples of one shard, in its own order."""

    table: pa.Table
    """A row a sample: `id` int64, `height` and `width` int32 (upright; 0: not known), `digest` uint64 (xxh3_64 of the
    stored bytes: images, then texts), the columns of the kind, those of the metadata; `c:FIELD` bool (optional):
    whether there is a caption in that field; `i:NAME` bool (optional): whether there is an image of that name next to
    the image. Take columns by `column`, which looks whether they are whole."""
    about: About
    file: Path | None = None
    """Where it was loaded from."""
    digests: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of the columns of that file that were not looked at yet."""
    digest: int = 0
    """Of all that is in that file."""

    def column(self, name: str) -> pa.Array:
        """One column. BadIndex where its bytes are not those that were written."""
        array = _array(self.table[name])
        # One look: threads share an index, and another may take the digest away at any time.
        if (expected := self.digests.get(name)) is not None:
            if _digest(array) != expected:
                raise BadIndex(f"{self.file}: this index is damaged (column {name}): delete it, and it is made again")
            array.validate(full=True)
            self.digests.pop(name, None)  # type: ignore[attr-defined]
        return array

    def numpy(self, name: str) -> np.ndarray:
        """A column of numbers without nulls, not copied."""
        array = self.column(name)
        kind = np.dtype(array.type.to_pandas_dtype())
        if not len(array):
            return np.empty(0, kind)
        return np.frombuffer(
            array.buffers()[1], kind, len(array), array.offset * kind.itemsize
        )  # to_numpy loads pandas

    def whole(self) -> pa.Table:
        """All columns, looked at. BadIndex as `column`."""
        for name in list(self.digests):
            self.column(name)
        return self.table


def sample_ids(shard_digest: str, rows: np.ndarray) -> np.ndarray:
    """[N] int64: stable 63-bit ids of rows [N] int64 (or other places) of the shard with these contents."""
    start = blake2b(bytes.fromhex(shard_digest), digest_size=8)
    ids = np.empty(len(rows), dtype=np.int64)
    for i, row in enumerate(rows.tolist()):
        one = start.copy()
        one.update(row.to_bytes(8, "little"))
        ids[i] = int.from_bytes(one.digest(), "little") >> 1
    return ids


def file_digest(path: Path) -> str:
    """xxh3_128 of a whole file, hex."""
    return digests.xxh3_128(path)


def metadata_columns(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, pa.Array], tuple[str, ...], tuple[str, ...]]:
    """The columns of metadata that filters can use, the names that are kept, and those that are not.

    Numbers (true is 1) become `n:NAME` float64, text `s:NAME`; a name with a long text, a list or an object somewhere
    is not kept at all, so that what is missing in a column is missing in the data.
    """
    found: dict[tuple[str, str], list[Any]] = {}
    not_kept: set[str] = set()
    for number, row in enumerate(rows):
        for given, value in row.items():
            if value is None:
                continue
            name, kind = mended(given), ""
            if isinstance(value, (int, float)):
                kind, value = "n", _number(value)
            elif isinstance(value, str) and len(value) <= TEXT_LIMIT:
                kind, value = "s", mended(value)
            if (kind, name) not in found:
                if not kind or len(found) == FIELD_LIMIT:
                    not_kept.add(name)
                    continue
                found[kind, name] = [None] * len(rows)
            found[kind, name][number] = value
    types = {"n": pa.float64(), "s": pa.string()}
    kept = [(kind, name) for kind, name in sorted(found) if name not in not_kept]
    columns = {f"{kind}:{name}": pa.array(found[kind, name], types[kind]) for kind, name in kept}
    return columns, tuple(sorted({name for _, name in kept})), tuple(sorted(not_kept))


def brief(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata with what `metadata_columns` will not keep left away, so that a whole shard's fits the memory."""
    found = {}
    for name, value in metadata.items():
        too_long = isinstance(value, str) and len(value) > TEXT_LIMIT
        found[sys.intern(name)] = [] if too_long or isinstance(value, (list, dict)) else value
    return found


def _number(value: float) -> float | None:
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond all floats
        return None


def caption_columns(fields: Sequence[Collection[str]]) -> dict[str, pa.Array]:
    """`c:NAME` bool for each name in `fields`, the caption fields in which each sample has text."""
    names = sorted({name for there in fields for name in there})[:FIELD_LIMIT]
    return {f"c:{name}": pa.array([name in there for there in fields], pa.bool_()) for name in names}


def image_columns(there: Sequence[Collection[str]]) -> dict[str, pa.Array]:
    """`i:NAME` bool for each name in `there`, the images that each sample has next to its image."""
    names = sorted({name for names in there for name in names})
    return {f"i:{name}": pa.array([name in names for names in there], pa.bool_()) for name in names}


def save(index: ShardIndex, to: Path | str) -> None:
    """Writes an index file at once or not at all. Equal indexes give equal files."""
    path = Path(to)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by the process's number: threads have one, and so may machines that share a folder.
    part = hidden(path, f".{secrets.token_hex(4)}.part")
    try:
        with naming(path):
            part.write_bytes(encoded(index))
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def encoded(index: ShardIndex) -> bytes:
    """The bytes of an index file: for a store."""
    about = json.dumps({"format": FORMAT, "about": asdict(index.about)}, allow_nan=False)
    table = index.table.combine_chunks().replace_schema_metadata({_KEY: about})
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)  # one batch, so that each column is one piece of memory
    stream = sink.getvalue()
    written = ipc.open_stream(stream).read_all()
    columns = {name: _digest(_array(written[name])) for name in written.column_names}
    span = _columns_span(stream, written)
    digests = json.dumps({"span": span, "frame": _frame_digest(stream, *span), "columns": columns}).encode()
    end = _END.pack(len(digests), xxhash.xxh3_64_intdigest(digests))
    return bytes(stream.to_pybytes() + digests + end)  # readers of Arrow stop at the stream's end


def load(path: Path) -> ShardIndex:
    """An index by memory map; the last ones are kept. BadIndex where it has to be made again; OSError as it is."""
    stat = path.stat()
    return _loaded(path, stat.st_ino, stat.st_mtime_ns, stat.st_size)


def _mapped(path: Path) -> ShardIndex:
    try:
        local_files.check_regular(path)
    except (IsADirectoryError, Irregular) as error:
        raise BadIndex(f"{path} is not an index: it is not a file") from error
    with pa.memory_map(str(path)) as file:
        buffer = file.read_buffer()
    return decoded(buffer, path)


@lru_cache(maxsize=4096)
def _loaded(path: Path, inode: int, mtime_ns: int, size_bytes: int) -> ShardIndex:
    return _mapped(path)


def decoded(buffer: pa.Buffer, path: Path) -> ShardIndex:
    """The opposite of `encoded`, without copying or reading columns. BadIndex, with `path` in it."""
    try:
        return _decoded(buffer, path)
    except (ValueError, LookupError) as error:  # pyarrow's for what is malformed is a ValueError
        raise BadIndex(f"{path} is damaged, or an index of another version: {error}") from error


def _decoded(buffer: pa.Buffer, path: Path) -> ShardIndex:
    length, digest = _END.unpack(buffer[-_END.size :].to_pybytes()) if len(buffer) >= _END.size else (0, 0)
    end = len(buffer) - _END.size - length
    if end < 0 or xxhash.xxh3_64_intdigest(digests := buffer[end : end + length].to_pybytes()) != digest:
        raise ValueError("it is incomplete")
    expected = json.loads(digests)  # as it was written, and so is the rest, but for the columns
    if _frame_digest(buffer[:end], *expected["span"]) != expected["frame"]:
        raise ValueError("its digest does not match its content")
    reader = ipc.open_stream(buffer[:end])
    said = json.loads(reader.schema.metadata[_KEY])
    if said["format"] != FORMAT:
        raise ValueError(f"its format is {said['format']}, not {FORMAT}")
    about = said["about"]
    about |= {name: tuple(about[name]) for name in ("fields", "not_kept")}
    about["damage"] = tuple((start, stop) for start, stop in about["damage"])
    return ShardIndex(reader.read_all(), About(**about), path, expected["columns"], digest)


@dataclass(frozen=True, slots=True)
class Head:
    """An index file without its columns: what stays in memory of each that was opened, however many there are.

    Opening a data set asks each several times, and a system does not allow a memory map for every one of them.
    """

    about: About
    count: int
    """Samples."""
    columns: tuple[str, ...]
    """Their names."""
    digest: int
    """Of all that is in the file."""


def head(path: Path) -> Head:
    """Of an index file, which is read the first time and when it has changed. BadIndex and OSError as `load`."""
    stat = path.stat()
    return _head(path, stat.st_ino, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1 << 20)
def _head(path: Path, inode: int, mtime_ns: int, size_bytes: int) -> Head:
    index = _mapped(path)  # the last ones that are kept are those that samples are read from
    about = replace(index.about, fields=_same(index.about.fields), not_kept=_same(index.about.not_kept))
    return Head(about, index.table.num_rows, _same(tuple(index.table.column_names)), index.digest)


@lru_cache(maxsize=1024)
def _same(names: tuple[str, ...]) -> tuple[str, ...]:
    """Equal names of many shards as one object."""
    return names


def _array(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece, without copying it where it is in one."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _digest(array: pa.Array) -> str:
    digest = xxhash.xxh3_64()
    for buffer in array.buffers():
        digest.update(b"-" if buffer is None else buffer)
    return digest.hexdigest()


def _columns_span(stream: pa.Buffer, table: pa.Table) -> tuple[int, int]:
    """The bytes of a stream with the columns; the rest says what they are called, of what type they are, and where."""
    chunks = [chunk for column in table.columns for chunk in column.chunks]
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers() if buffer is not None and buffer.size]
    if not buffers:
        return len(stream), len(stream)
    starts = [buffer.address - stream.address for buffer in buffers]
    return min(starts), max(start + buffer.size for start, buffer in zip(starts, buffers, strict=True))


def _frame_digest(stream: pa.Buffer, first: int, last: int) -> str:
    digest = xxhash.xxh3_64(stream[:first])
    digest.update(stream[last:])
    return digest.hexdigest()
