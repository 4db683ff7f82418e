"""Retention of checkpoints: the newest stay, and every n-th for good. Steps alone; deleting is store.py's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RetentionPolicy:
    """The checkpoints to keep."""

    newest: int = 2
    """Count of the newest verified ones; at least 2, so that one is left if the other is damaged."""
    interval: Callable[[int], int] | None = None
    """Counts the intervals of backups that are over after so many updates; None for no backups. In each one after the
    first, the oldest is kept for good: the first one at or after 1 x, 2 x, 3 x its length, then, also where the saves
    do not fall on it."""

    def __post_init__(self) -> None:
        if self.newest < 2:
            raise ValueError(f"keep is {self.newest}: at least 2 are kept, so that one is left if the other is damaged")

    def backups(self, steps: Sequence[int]) -> set[int]:
        """Those that are kept for good."""
        if self.interval is None:
            return set()
        first: dict[int, int] = {}
        for step in sorted(steps):
            first.setdefault(self.interval(step), step)
        return {step for stretch, step in first.items() if stretch > 0}

    def deletable(self, steps: Sequence[int], is_verified: Callable[[int], bool]) -> list[int]:
        """Those that may be deleted, newest first.

        `is_verified` verifies one, and sets it aside if it is damaged. It is called from the newest on, and only until
        enough are verified. A damaged one is never in the answer.
        """
        there, kept = sorted(steps, reverse=True), 0
        while there and kept < self.newest:
            if is_verified(there.pop(0)):
                kept += 1
        backups = self.backups(steps)
        return [step for step in there if step not in backups]
