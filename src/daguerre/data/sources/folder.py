"""A folder of JPEG, PNG and WebP files with captions beside them or in a metadata.jsonl.

Holds the settings, the source and its split. Finding files and captions is `daguerre.data.folder_scan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from daguerre import keys
from daguerre.data import folder_scan
from daguerre.data.settings import SourceSettings
from daguerre.data.skips import SkipReport
from daguerre.data.source import Split
from daguerre.settings import FREE
from daguerre.types import Record


class Settings(SourceSettings):
    """Captioned pictures in a folder: `cat.jpg` with `cat.txt`, or a metadata.jsonl with `file_name` and `text`."""

    source: Literal["folder"] = "folder"
    """Name of this source."""
    path: str = Field(min_length=1, json_schema_extra=FREE)
    """The folder; folders inside it are read too. It may move between two starts: samples are known by their path
    inside it."""
    held_out_fraction: float = Field(0.05, ge=0, le=0.5)
    """Share of samples kept out of training for the validation loss, chosen by file name; at least one where there
    are two or more samples and this is above 0."""


@dataclass(frozen=True)
class FolderSource:
    """The samples of one split, in the order of their paths."""

    folder: Path
    samples: tuple[folder_scan.Sample, ...]
    skipped: SkipReport
    metric: str | None = None

    @property
    def count(self) -> int:
        """Samples of an epoch."""
        return len(self.samples)

    def sample_id(self, index: int) -> int:
        """63-bit hash of the path inside the folder: other files, or another place of the folder, do not change it."""
        return self.samples[index].id

    def record(self, index: int) -> Record:
        """The file's bytes and caption. OSError if it cannot be read."""
        sample = self.samples[index]
        image = (self.folder / sample.path).read_bytes()
        return Record(sample.name, image, {"text": sample.text}, sample.metadata)

    def report(self) -> SkipReport:
        """What the scan left out and what it notes, of both splits."""
        return self.skipped


def open_source(settings: Settings, split: Split) -> FolderSource:
    """Scans the folder. UserError if it is missing or holds nothing to train on; `held_out` may be empty."""
    folder = Path(settings.path).expanduser()
    found = folder_scan.scan(folder, settings.resolution)
    held_out = _held_out(found.samples, settings.held_out_fraction)
    samples = tuple(s for s in found.samples if (s.id in held_out) == (split == "held_out"))
    return FolderSource(folder, samples, found.skipped)


def _held_out(samples: tuple[folder_scan.Sample, ...], fraction: float) -> set[int]:
    """Ids drawn with `fraction` each from a hash of the id, so that new files move no old one to the other split.

    Where none (or every one) is drawn, the one with the lowest draw is held out (the one with the highest trained on).
    """
    if fraction == 0 or len(samples) < 2:
        return set()
    draws = sorted((float(keys.uniforms(0, "held_out", s.id, count=1)[0]), s.id) for s in samples)
    number = sum(draw < fraction for draw, _ in draws)
    return {sample_id for _, sample_id in draws[: min(max(number, 1), len(draws) - 1)]}
