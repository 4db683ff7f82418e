"""The choice of samples of a large set in a file of the cache folder: made once, by one process, and shared by all
processes of a machine by memory map. The file's name says of which index files and settings.

An Arrow stream whose columns have one list each. Each list has a digest, which is looked at when the file is opened.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from pyarrow import ipc

from daguerre.data.index import cache
from daguerre.data.index.file import BadIndex
from daguerre.data.skipped import SkipReport
from daguerre.fresh import hidden, naming

SUFFIX = ".chosen"
KEPT = 8
"""Files that stay in a cache folder; those that were not used for longest are removed when another is written."""
_SAID, _DIGEST = b"daguerre", b"digest"


class Choice(NamedTuple):
    """The samples of one split."""

    bits: np.ndarray
    """[blocks, 64] uint8: the bits of a `Bitmap`."""
    buckets: np.ndarray
    """[M] int16: the bucket of each."""
    by_shard: np.ndarray
    """[S, number of buckets] int32: how many of each bucket are in each shard."""
    left_out: SkipReport
    images: Mapping[str, int]
    """How many have this further image."""
    fingerprint: str
    """Of all of them, in their shards and buckets."""


_ARRAYS = ("bits", "buckets", "by_shard")


def choices(
    path: Path,
    choose: Callable[[], Sequence[Choice]],
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> list[Choice]:
    """The choices in a file, by memory map. Chooses where there is no such file, or a damaged one; of several processes
    one chooses, and the others wait for it. UserError where the file cannot be written."""
    if (found := _found(path, lambda text: None)) is None:
        with cache.alone(path.parent.parent, say):
            if (found := _found(path, say)) is None:
                say("choosing the samples of a large data set: once for these settings, and kept in data.cache_dir")
                _save(choose(), path)
                found = _read(path)
    return found


def _found(path: Path, say: Callable[[str], None]) -> list[Choice] | None:
    try:
        found = _read(path)
    except FileNotFoundError:
        return None
    except (BadIndex, OSError, ValueError, LookupError) as error:  # pyarrow's for what is malformed is a ValueError
        say(f"{path} is damaged, and made again: {error}")
        return None
    now = time.time_ns()  # a file system's own clock stands still for milliseconds
    with suppress(OSError):
        os.utime(path, ns=(now, now))
    return found


def _read(path: Path) -> list[Choice]:
    with pa.memory_map(str(path)) as file:
        table = ipc.open_stream(file).read_all()
    metadata = table.schema.metadata
    if _digest(metadata[_SAID]) != metadata[_DIGEST].decode():
        raise BadIndex("what it says of its columns is not what was written")
    found = []
    for number, said in enumerate(json.loads(metadata[_SAID])):
        for name in _ARRAYS:
            about = said[name]
            values = table[f"{number}:{name}"].chunk(0).values
            flat = np.frombuffer(values.buffers()[1], about["kind"], len(values)) if len(values) else np.zeros(0)
            if _digest(flat.data) != about["digest"]:
                raise BadIndex(f"its column {name} is not what was written")
            said[name] = flat.astype(about["kind"], copy=False).reshape(about["shape"])
        found.append(Choice(**said))
    return found


def _save(made: Sequence[Choice], path: Path) -> None:
    columns: dict[str, pa.Array] = {}
    said: list[dict[str, Any]] = []
    for number, choice in enumerate(made):
        said.append(choice._asdict())
        for name in _ARRAYS:
            array = np.ascontiguousarray(said[-1][name])
            said[-1][name] = {"kind": array.dtype.str, "shape": array.shape, "digest": _digest(array.data)}
            ends = pa.array([0, array.size], pa.int64())
            columns[f"{number}:{name}"] = pa.LargeListArray.from_arrays(ends, pa.array(array.ravel()))
    text = json.dumps(said, allow_nan=False).encode()
    batch = pa.record_batch(columns).replace_schema_metadata({_SAID: text, _DIGEST: _digest(text)})
    part = hidden(path, f".{secrets.token_hex(4)}.part")
    try:
        with naming(path), pa.OSFile(str(part), "wb") as file, ipc.new_stream(file, batch.schema) as writer:
            writer.write_batch(batch)
        part.replace(path)
        by_age = sorted(path.parent.glob(f"*{SUFFIX}"), key=lambda each: each.stat().st_mtime_ns)
        for old in by_age[:-KEPT]:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise cache.cannot_write(path.parent, error) from error
    finally:
        part.unlink(missing_ok=True)


def _digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)
