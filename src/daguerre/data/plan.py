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
            places = np.array(
                [_order(self.seed, self.count, int(e))[p] for e, p in zip(epochs, places, strict=True)], dtype=np.int64
            )
        return np.stack([places, epochs], axis=1)


@lru_cache(maxsize=2)
def _order(seed: int, count: int, epoch: int) -> np.ndarray:
    """The shuffled order of one epoch; a batch touches two epochs at most unless it is larger than one."""
    return keys.permutation(seed, "shuffle", epoch, count)
