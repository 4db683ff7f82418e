"""Numbers of chosen samples as bits, and what is looked up by them: a set of a billion takes an eighth of a GB."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from daguerre.data.index.index import Column

BLOCK = 512
"""Samples after which the chosen ones are counted; `Index.parts` are whole blocks."""
_AT_ONCE = 1 << 13
"""Most blocks that are unpacked at a time."""


def packed(parts: Iterable[np.ndarray]) -> np.ndarray:
    """[blocks, 64] uint8: the bits of a `Bitmap`, from stretches of samples [n] bool that are whole blocks, but for the
    last one."""
    bits = np.concatenate([np.zeros(0, np.uint8), *(np.packbits(part, bitorder="little") for part in parts)])
    return np.pad(bits, (0, -len(bits) % (BLOCK // 8))).reshape(-1, BLOCK // 8)


@dataclass(frozen=True, eq=False)
class Bitmap:
    """Ascending numbers, read as an array of them is: `numbers[places]`, `numbers[start:stop]`."""

    bits: np.ndarray
    """[blocks, 64] uint8, of each byte the lowest bit first."""

    @cached_property
    def _before(self) -> np.ndarray:
        """[blocks + 1] int64: numbers before each block."""
        counts = np.bitwise_count(self.bits.view(np.uint64)).sum(axis=1, dtype=np.int64)
        return np.concatenate([[0], np.cumsum(counts)])

    def __len__(self) -> int:
        return int(self._before[-1])

    def __getitem__(self, places: Any, /) -> Any:
        if isinstance(places, slice):
            start, stop, step = places.indices(len(self))
            assert step == 1
            return self._stretch(start, stop)
        asked = np.asarray(places)
        if asked.dtype == bool:
            asked = np.flatnonzero(asked)
        found = np.empty(asked.size, dtype=np.int64)
        for first in range(0, asked.size, _AT_ONCE):
            some = asked.ravel()[first : first + _AT_ONCE]
            blocks = np.searchsorted(self._before, some, side="right") - 1
            counted = np.cumsum(self._unpacked(blocks), axis=1, dtype=np.int16)
            found[first : first + _AT_ONCE] = blocks * BLOCK + (
                counted > (some - self._before[blocks])[:, None]
            ).argmax(axis=1)
        return found.reshape(asked.shape)[()]

    def rank(self, numbers: np.ndarray) -> np.ndarray:
        """[n] int64: how many are below each of these numbers: the places at which they stand, or would."""
        found = np.empty(len(numbers), dtype=np.int64)
        for first in range(0, len(numbers), _AT_ONCE):
            some = numbers[first : first + _AT_ONCE]
            blocks = np.minimum(some // BLOCK, len(self.bits) - 1)
            below = np.arange(BLOCK) < (some - blocks * BLOCK)[:, None]
            inside = (self._unpacked(blocks) & below).sum(axis=1)
            found[first : first + _AT_ONCE] = self._before[blocks] + inside
        return found

    def _unpacked(self, blocks: np.ndarray) -> np.ndarray:
        """[n, BLOCK] uint8, 0 or 1."""
        return np.unpackbits(self.bits[blocks], axis=1, bitorder="little")

    def _stretch(self, start: int, stop: int) -> np.ndarray:
        if start >= stop:
            return np.zeros(0, dtype=np.int64)
        first, last = (np.searchsorted(self._before, [start, stop - 1], side="right") - 1).tolist()
        found = np.flatnonzero(np.unpackbits(self.bits[first : last + 1], bitorder="little")) + first * BLOCK
        before = int(self._before[first])
        return found[start - before : stop - before]


@dataclass(frozen=True, eq=False)
class Through:
    """The values of chosen samples: those of a column at their numbers."""

    column: Column
    numbers: Column

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, places: Any, /) -> Any:
        return self.column[self.numbers[places]]
