"""The contract of every tracker: it takes what a run sends, also from where an earlier process stopped, and ends.

That what it wrote can be read back is a test of each tracker's own: only it knows where.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from daguerre.contracts import contract
from daguerre.tracking.settings import TrackerSettings
from daguerre.tracking.sinks import Sink
from daguerre.tracking.tracker import EarlierImage, TrackedRun

GREY = np.full((8, 8, 3), 7, np.uint8)
IMAGE, TEXT = "samples/000", "# a *star*\nseed 3\ud83d"
"""The name and the words of an image, as a run has them: words may hold anything."""


def tracked(folder: Path, steps: range = range(0), resumed: bool = False) -> TrackedRun:
    """A run whose metrics file has these steps, and one image at the last of them."""
    lines = [
        {"step": step, "samples": 32 * step, "time": f"2026-11-22T00:00:{step:02d}+00:00", "learning/loss": 1 / step}
        for step in steps
    ]
    images = []
    if steps:
        Image.fromarray(GREY).save(folder / "000.png")
        images = [EarlierImage(steps[-1], IMAGE, folder / "000.png", TEXT)]
    return TrackedRun("first", folder, {"seed": 1}, max(steps, default=0), resumed, lines, images, lambda line: None)


def written(sink: Sink, steps: range) -> None:
    """Sends numbers of each step, and an image and an evaluation at the last."""
    for step in steps:
        sink.write(step, 32 * step, {"learning/loss": 1 / step})
    sink.show(steps[-1], IMAGE, GREY, TEXT)
    sink.write(steps[-1], 32 * steps[-1], {"evaluation/shapes/colour": 0.5})


class TrackerContract(contract.SettingsContract):
    """A tracker's promises."""

    kind = "trackers"
    start = TrackerSettings

    @pytest.fixture
    def settings(self, plugin: Any, given: Any) -> Any:
        """The settings, checked as before a training."""
        own = plugin.Settings(**given)
        plugin.check(own)
        return own

    def test_it_takes_what_a_run_sends_and_ends(self, plugin: Any, settings: Any, tmp_path: Path) -> None:
        sink = plugin.start(settings, tracked(tmp_path))
        written(sink, range(1, 6))
        sink.close()

    def test_it_goes_on_with_a_run_that_was_killed(self, plugin: Any, settings: Any, tmp_path: Path) -> None:
        killed = plugin.start(settings, tracked(tmp_path))
        written(killed, range(1, 6))
        sink = plugin.start(settings, tracked(tmp_path, range(1, 4), resumed=True))
        written(sink, range(4, 8))
        sink.close()

    def test_numbers_that_are_not_finite_end_nothing(self, plugin: Any, settings: Any, tmp_path: Path) -> None:
        sink = plugin.start(settings, tracked(tmp_path))
        sink.write(1, 32, {"learning/loss": float("nan"), "learning/gradient_norm": float("inf")})
        sink.close()
