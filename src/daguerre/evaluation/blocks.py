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

from daguerre.checkpoint.atomic import locked, make_folder, write_bytes_atomically
from daguerre.evaluation.metric import Incomplete
from daguerre.generation.jobs import TaskShard
from daguerre.tracking.progress import Counter

BLOCK = 32
"""Samples of a block."""


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
        if whole.is_file():
            return read(whole)
        folder = self.folder / name
        make_folder(folder)
        numbers = range(-(-self.total // BLOCK))
        mine = [number for number in numbers if number in self.part and not _file(folder, number).is_file()]
        with Counter(name, sum(len(self._ids(number)) for number in mine), unit="images") as counter:
            for number in mine:
                rows = make(self._ids(number))
                assert len(rows) == len(self._ids(number)), f"{name}: {rows.shape} for {self._ids(number)}"
                save(_file(folder, number), rows)
                counter.add(len(rows))
        return self._joined(name, folder, whole, numbers)

    def _ids(self, number: int) -> range:
        return range(number * BLOCK, min(self.total, (number + 1) * BLOCK))

    def _joined(self, name: str, folder: Path, whole: Path, numbers: range) -> np.ndarray:
        """All blocks as one file. Of several processes that find them complete, one writes it."""
        with locked(self.folder):
            if not whole.is_file():
                if not all(_file(folder, number).is_file() for number in numbers):
                    raise Incomplete(name)
                save(whole, np.concatenate([read(_file(folder, n)) for n in numbers]))
                with suppress(OSError):
                    shutil.rmtree(folder)
        return read(whole)


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.npy"


def save(path: Path, array: np.ndarray) -> None:
    """Writes an array, whole or not at all. OSError."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_bytes_atomically(path, buffer.getvalue())


def read(path: Path) -> np.ndarray:
    """The array of a file. OSError."""
    found: np.ndarray = np.load(path, allow_pickle=False)
    return found
