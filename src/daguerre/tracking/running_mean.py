"""The running mean by which the terminal and the report show a loss, so that both show one number."""

import math
from collections.abc import Iterable, Sequence

_MEMORY = 0.95


class RunningMean:
    """Mean of the values so far in which each counts a twentieth less than the next; values that are no numbers do not
    count."""

    def __init__(self, values: Iterable[float] = (), state: Sequence[float] = (0.0, 0.0)) -> None:
        """`state` of another one: goes on from there."""
        self._sum, self._weight = state
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        """Takes in the newest value."""
        if math.isfinite(value):
            self._sum, self._weight = _MEMORY * self._sum + value, _MEMORY * self._weight + 1.0

    @property
    def state(self) -> list[float]:
        """All that it knows, for JSON."""
        return [self._sum, self._weight]

    @property
    def value(self) -> float | None:
        """The mean; None before the first number."""
        return self._sum / self._weight if self._weight else None
