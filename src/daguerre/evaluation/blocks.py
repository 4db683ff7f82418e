"""Arrays by sample id, made in blocks of fixed ids, by any number of processes.

A block is computed as a whole, whoever does it: networks round otherwise in batches of other sizes. So the array is
equal to the bit for any number of processes of one kind of machine, and wherever one of them was killed.
"""

import io
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from daguerre import regular
from daguerre.checkpoint.atomic import locked, make_folder, write_bytes_atomically
from daguerre.evaluation.metric import Incomplete
from daguerre.generation.jobs import TaskShard
from daguerre.tracking.progress import Counter

BLOCK = 32
"""Samples of a block."""
_MARK, _DIGEST_BYTES = b"xxh3name", 16
_EARLIER_MARK = b"xxh3_128"
"""Of files whose digest does not have their name in it."""
_TRAILER_BYTES = len(_MARK) + _DIGEST_BYTES


@dataclass(frozen=True)
class Blocks:
    """Arrays in a folder, one row for each of `total` samples; `part` of the blocks are this process's."""

    folder: Path
    total: int
    part: TaskShard

    def array(self, name: str, make: Callable[[range], np.ndarray]) -> np.ndarray:
        """[total, ...]: the array of this name; `make` gives the rows of the blocks that are not there yet. Incomplete
        if other processes still have some to make."""
        whole = self.folder / f"{name}.npy"
        if (known := sound(whole, self.total)) is not None:
            return known
        folder = self.folder / name
        make_folder(folder)
        numbers = range(-(-self.total // BLOCK))
        mine = [number for number in numbers if number in self.part and self._block(folder, number) is None]
        with Counter(name, sum(len(self._ids(number)) for number in mine), unit="images") as counter:
            for number in mine:
                rows = make(self._ids(number))
                assert len(rows) == len(self._ids(number)), f"{name}: {rows.shape} for {self._ids(number)}"
                save(_file(folder, number), rows)
                counter.add(len(rows))
        return self._joined(name, folder, whole, numbers)

    def _block(self, folder: Path, number: int) -> np.ndarray | None:
        return sound(_file(folder, number), len(self._ids(number)))

    def _ids(self, number: int) -> range:
        return range(number * BLOCK, min(self.total, (number + 1) * BLOCK))

    def _joined(self, name: str, folder: Path, whole: Path, numbers: range) -> np.ndarray:
        """All blocks as one file. Of several processes that find them complete, one writes it."""
        with locked(self.folder):
            if (known := sound(whole, self.total)) is not None:  # another process was first
                return known
            parts = [self._block(folder, number) for number in numbers]
            if any(part is None for part in parts):
                raise Incomplete(name)
            joined = np.concatenate([part for part in parts if part is not None])
            save(whole, joined)
            with suppress(OSError):
                shutil.rmtree(folder)
        return joined


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.npy"


def save(path: Path, array: np.ndarray) -> None:
    """Writes an array, whole or not at all, with a digest of it and its file's name behind it, where numpy reads past
    it. OSError."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    data = buffer.getvalue()
    write_bytes_atomically(path, data + _MARK + xxhash.xxh3_128_digest(data + path.name.encode()))


def read(path: Path) -> np.ndarray:
    """The array of a file. OSError; ValueError for one that differs from what was written. Files of versions before 0.2
    have no digest, and are checked for their length alone."""
    data = regular.content(path)
    mark, digest = data[-_TRAILER_BYTES:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if mark in (_MARK, _EARLIER_MARK):
        data = data[:-_TRAILER_BYTES]
        name = path.name.encode() if mark == _MARK else b""  # two files that changed places are damage, too
        if xxhash.xxh3_128_digest(data + name) != digest:
            raise ValueError("it is not as it was written")
    # A header that is cut gives numpy any of these.
    try:
        found: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
    except (EOFError, SyntaxError, KeyError, TypeError) as error:
        raise ValueError(str(error)) from error
    return found


def sound(path: Path, count: int | None = None) -> np.ndarray | None:
    """The array of a file; None without a file. A damaged file, or one that has not `count` rows, is removed, with a
    message, and made again."""
    try:
        found = read(path)
        if count in (None, len(found)):
            return found
        why = f"it has {len(found):,} rows, not {count:,}"
    except FileNotFoundError:
        return None
    except ValueError as error:
        why = str(error)
    print(f"{path} is damaged ({why}): it is made again", flush=True)
    path.unlink(missing_ok=True)
    return None
