"""The contract of every data source. A file in data/sources is a source when it defines

    class Settings(SourceSettings)                                    # torch-free; `source` narrowed to the file's name
    def open_source(settings: Settings, split: Split) -> Source

Choosing, decoding, cropping and captions are the same behind every source, and not here.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal, Protocol

import numpy as np

from daguerre.data.skips import SkipReport
from daguerre.types import Record

Split = Literal["train", "held_out"]
"""`held_out` is what training never sees: for the validation loss and sample prompts."""


class Source(Protocol):
    """Records by index; the same index gives the same record for ever, in any process."""

    @property
    def count(self) -> int | None:
        """Records of an epoch; None is endless, with indexes 0, 1, 2 and so on."""

    @property
    def metric(self) -> str | None:
        """The metric (a file in evaluation) that can read pictures of this source; None if there is none."""

    def sample_id(self, index: int) -> int:
        """A stable 63-bit id: what all random numbers of the sample are keyed by. Unlike in the two splits."""

    def record(self, index: int) -> Record:
        """Record `index`. OSError for a fault that may pass; it is tried again."""

    def report(self) -> SkipReport:
        """What the source left out when it was opened, by reason."""


def fingerprint(source: Source) -> str:
    """A digest of the sample ids in their order: what must be equal for a run to go on as if nothing had happened."""
    if source.count is None:
        return "endless"
    ids = np.fromiter((source.sample_id(i) for i in range(source.count)), dtype="<i8", count=source.count)
    return blake2b(ids.tobytes(), digest_size=16).hexdigest()
