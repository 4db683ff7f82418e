"""The contract of every data source. A file in data/sources is a source when it defines

    class Settings(SourceSettings)                                    # torch-free; `source` narrowed to the file's name
    def open_source(settings: Settings, split: Split) -> Source

Filters, what is held out, order, buckets, decoding, cropping and captions are the same behind every source, and not
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

from daguerre.data.index.index import Index
from daguerre.data.skipped import SkipReport
from daguerre.types import Record

Split = Literal["train", "held_out"]
"""`held_out` is what training never sees: for the validation loss and sample prompts."""


class Source(Protocol):
    """Records by number; the same number gives the same record for ever, in any process.

    A source travels to the workers: what it holds is small (paths, not samples), and `index` is read where it is
    asked for.
    """

    @property
    def index(self) -> Index | None:
        """All its samples, of both splits: who is held out is decided by id, for all sources alike. None: endless, with
        the numbers 0, 1, 2 and so on, which are other records in the other split."""

    @property
    def metric(self) -> str | None:
        """The metric (a file in evaluation) that can read pictures of this source; None if there is none."""

    def sample_id(self, number: int) -> int:
        """A stable 63-bit id: what all random numbers of the sample are keyed by; `index.ids[number]`."""

    def name(self, number: int) -> str:
        """What a person would call the sample: its file, or shard and place in it. Nothing is read."""

    def record(self, number: int) -> Record:
        """Record `number`. OSError for a fault that may pass, and is tried again; `Undecodable` for bytes that are
        damaged for good: the slot stays empty and is counted."""

    def report(self) -> SkipReport:
        """What the source left out when it was opened, by reason."""


@runtime_checkable
class FeatureSource(Source, Protocol):
    """A source whose records hold cached features; others need none of this."""

    @property
    def features(self) -> Mapping[str, np.ndarray]:
        """A feature of each name that all its records have: for its shape and type, which are theirs as well."""


class Files(NamedTuple):
    """The files that a source's S shards are in; often each is a file of its own."""

    of_shards: np.ndarray
    """[S] int64: the number of each shard's file."""
    sizes_bytes: np.ndarray
    """[files] int64: room in the cache that each takes; 0 for those that are near or read by ranges."""


@runtime_checkable
class FarSource(Source, Protocol):
    """A source whose samples may come over a network; others need none of this."""

    @property
    def far(self) -> bool:
        """Whether they do."""

    def reading(self, shares: np.ndarray) -> Self:
        """The same source, told which share [S] float64 of each shard's samples will be read: by that it decides
        between fetching a shard whole and reading ranges of it."""

    @property
    def files(self) -> Files:
        """Where its shards are. Nothing is asked of a store."""

    def prefetch(self, file: int) -> int:
        """Brings file number `file` near if it is read whole; its bytes in the cache now, 0 where it takes no room.
        OSError or UserError for a fault: the read that needs the file will meet it again, and say so."""
