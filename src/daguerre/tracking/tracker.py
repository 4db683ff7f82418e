"""The contract of trackers: programs outside that show a run's numbers and images.

A file in `tracking/trackers` has `Settings`, `check(settings)`, which is called before training and raises a UserError
for what is missing, and `start(settings, run)`, which gives a `Sink`. The metrics file is the truth and a tracker its
copy: any error ends the copy alone (`background.py`), and the next start can write it again from `run.history`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class EarlierImage:
    """A sample image that an earlier process of the run has made."""

    step: int
    name: str
    """As `Sink.show` gets it."""
    path: Path
    text: str


@dataclass(frozen=True)
class TrackedRun:
    """The run, as a tracker gets to know it."""

    name: str
    folder: Path
    """Where a tracker may write, under names of its own."""
    config: Mapping[str, Any]
    """The resolved recipe, without secrets."""
    step: int = 0
    """Updates of the checkpoint that the run goes on from."""
    resumed: bool = False
    """It goes on from a checkpoint."""
    history: Sequence[Mapping[str, Any]] = ()
    """The lines of `metrics.jsonl` up to `step`, oldest first."""
    images: Sequence[EarlierImage] = ()
    """Sample images up to `step`, oldest first."""
    say: Callable[[str], None] = print
    """Shows a line at the terminal."""
    evaluations: Sequence[Mapping[str, Any]] = ()
    """Results of `daguerre evaluate` that this tracker has taken before, as lines of metrics."""
