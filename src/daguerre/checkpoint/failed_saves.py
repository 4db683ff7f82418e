"""What a run does about saves that fail: it goes on, says so, counts, tries again at the next one, and stops when too
many have failed in a row.

A full disk may be cleared and a slow server may come back; the training done meanwhile is worth more than the
checkpoint. Nothing here saves; earlier checkpoints are never touched by a save that fails.
"""

from __future__ import annotations

from dataclasses import dataclass

from daguerre.checkpoint.manifest import CheckpointError


@dataclass
class FailedSaves:
    """Counts of one run."""

    most_in_a_row: int = 3
    """With so many one after another, the run stops; 1 stops it at the first."""
    in_a_row: int = 0
    total: int = 0
    """All failures of this run, those before a good save among them."""

    def __post_init__(self) -> None:
        if self.most_in_a_row < 1:
            raise ValueError(f"most_in_a_row is {self.most_in_a_row}: give 1 or more")

    def failed(self, error: CheckpointError) -> str:
        """Counts a failure; what to tell. Raises it if it is one too many."""
        self.in_a_row += 1
        self.total += 1
        if self.in_a_row >= self.most_in_a_row:
            times = "" if self.in_a_row == 1 else f" ({self.in_a_row} saves in a row failed)"
            raise CheckpointError(f"{error}{times}") from error
        left = self.most_in_a_row - self.in_a_row
        return (
            f"SAVE FAILED ({self.in_a_row} in a row, {self.total} in all): {error}. Training goes on and the next save "
            f"tries again; after {left} more the run stops"
        )

    def succeeded(self) -> list[str]:
        """Resets what is counted in a row; what to tell."""
        before, self.in_a_row = self.in_a_row, 0
        return [f"saving works again, after {before} that failed"] if before else []
