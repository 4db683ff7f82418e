"""The order of training: one endless stream of sample slots, a pure function of the seed and the source's count.

Global batch n takes the slots from n x size on, whoever computes it; a position is a count of
slots. Nothing is read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from daguerre import keys


@dataclass(frozen=True)
class Plan:
    """Slots of a source with `count` records an epoch (None: endless, in the source's own order)."""

    seed: int
    count: int | None
    shuffle: bool

    def slots(self, position: int, n: int) -> np.ndarray:
        """[n, 2] int64: index and epoch of the slots from `position` on. Each epoch holds each index once."""
        numbers = np.arange(position, position + n, dtype=np.int64)
        if self.count is None:
            return np.stack([numbers, np.zeros_like(numbers)], axis=1)
        epochs, places = np.divmod(numbers, self.count)
        if self.shuffle:
            for epoch in range(int(epochs[0]), int(epochs[-1]) + 1) if n else ():
                now = epochs == epoch
                places[now] = _order(self.seed, self.count, epoch)[places[now]]
        return np.stack([places, epochs], axis=1)


@lru_cache(maxsize=1)
def _order(seed: int, count: int, epoch: int) -> np.ndarray:
    """The shuffled order of one epoch; slots are asked for in order, so one order is kept."""
    return keys.permutation(seed, "shuffle", epoch, count)
