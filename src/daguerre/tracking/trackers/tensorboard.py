"""TensorBoard: event files in the run's folder."""

import textwrap
from collections.abc import Mapping
from typing import Literal

import numpy as np

from daguerre.tracking.settings import TrackerSettings
from daguerre.tracking.tracker import TrackedRun


class Settings(TrackerSettings):
    """TensorBoard event files in the folder tensorboard/ of the run."""

    name: Literal["tensorboard"] = "tensorboard"
    """Name of this tracker."""


def check(settings: Settings) -> None:
    """It needs nothing."""


class TensorBoard:
    """Event files with the names of `metrics.jsonl`, and sample images with their prompts.

    What an earlier process wrote after the step that the run goes on from (from nothing: all of it) is hidden.
    """

    def __init__(self, run: TrackedRun) -> None:
        # Loading it takes a second, so only a run that asks for TensorBoard pays.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1 if run.resumed else 0)
        self._counted_at = run.step if run.resumed else -1

    def write(self, step: int, samples: int, values: Mapping[str, float]) -> None:
        """Add every value at `step`, and `samples` once."""
        counted = {"samples": samples} if step > self._counted_at else {}
        self._counted_at = max(step, self._counted_at)
        for name, value in {**counted, **values}.items():
            self._writer.add_scalar(name, float(value), step)

    def show(self, step: int, name: str, pixels_HWC: np.ndarray, text: str) -> None:
        """Add the image and its text, and hand all to the system, so that a killed run keeps them. The text is shown
        as it is: TensorBoard would read it as Markdown."""
        self._writer.add_image(name, pixels_HWC, step, dataformats="HWC")
        plain = text.encode("utf-8", "replace").decode("utf-8")
        self._writer.add_text(name, textwrap.indent(plain, "    ", lambda line: True), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def start(settings: Settings, run: TrackedRun) -> TensorBoard:
    """The writer of a run's event files."""
    return TensorBoard(run)
