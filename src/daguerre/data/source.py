"""The contract of every data source. A file in data/sources is a source when it defines

    class Settings(SourceSettings)                                    # torch-free; `source` narrowed to the file's name
    def open_source(settings: Settings, split: Split) -> Source

Filters, splits, order, buckets, decoding, cropping and captions are the same behind every source.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

from daguerre.data.plan.buckets import Bucket
from daguerre.data.settings import SourceSettings
from daguerre.data.skipped import SkipReport
from daguerre.storage.file_cache import ShardCache, default_folder
from daguerre.types import Record

if TYPE_CHECKING:
    from daguerre.data.images.decode import Frame  # imports torch, which a source does without
    from daguerre.data.index.index import Index  # imports pyarrow, likewise

Split = Literal["train", "held_out"]
"""`held_out` is for the validation loss and sample prompts; training never sees it."""

WHOLE_SHARE = 0.25
"""Share of the rows of a remote table, or of the samples of a remote shard, from which on it is fetched whole."""


class Source(Protocol):
    """Records by number; the same number gives the same record for ever, in any process. A source travels to the
    workers, so it holds paths, not samples."""

    @property
    def index(self) -> Index | None:
        """All its samples, of both splits, which are chosen by id. None: endless, with the numbers 0, 1, 2 and so on,
        which are other records in the other split."""

    @property
    def metric(self) -> str | None:
        """The metric (a file in evaluation) that can read images of this source; None without one."""

    def sample_id(self, number: int) -> int:
        """A stable 63-bit id, the key of all random numbers of the sample; `index.ids[number]`."""

    def name(self, number: int) -> str:
        """The sample's name in messages: its file, or shard and place in it. Nothing is read."""

    def record(self, number: int) -> Record:
        """Record `number`. OSError for a fault that may pass, and is retried; `Undecodable` for bytes that are damaged
        for good: the slot stays empty and is counted."""

    def report(self) -> SkipReport:
        """Samples left out when the source was opened, by reason."""


@runtime_checkable
class FeatureSource(Source, Protocol):
    """A source whose records have cached features; others need none of this."""

    def features(self, height_px: int, width_px: int) -> Mapping[str, np.ndarray]:
        """A feature of each name for images of this shape, for its own shape and type."""


@runtime_checkable
class MendingSource(Protocol):
    """A source that can make features of a sample again; its record raises `rows.Lost` where they are damaged."""

    def mended(self, number: int, frames: Mapping[str, Frame], bucket: Bucket, text: str) -> Self:
        """The source, once what is damaged or gone of a sample's features is encoded again, in this process. UserError
        where it cannot be."""


@runtime_checkable
class StampedSource(Source, Protocol):
    """A source that can tell without reading a sample that it has not changed. Samples of others are read at each start
    where their features are cached."""

    def stamps(self) -> np.ndarray | None:
        """[N] uint64: a number for each sample, made of sizes, times of change, ETags or digests. None where that is
        not known."""


@runtime_checkable
class CaptionedSource(Source, Protocol):
    """A source in which captions may change while its samples keep their ids."""

    def caption_digests(self) -> np.ndarray | None:
        """[N] uint64: a number for each sample, made of its captions, of which no file of a sample is read. None where
        its ids follow from the captions."""


class Files(NamedTuple):
    """The files of a source's S shards; often each is a file of its own."""

    of_shards: np.ndarray
    """[S] int64: the number of each shard's file."""
    sizes_bytes: np.ndarray
    """[files] int64: size of each in the cache; 0 for those that are local or read by ranges."""


@runtime_checkable
class RemoteSource(Source, Protocol):
    """A source whose samples may come over a network; others need none of this."""

    @property
    def is_remote(self) -> bool:
        """True if they do."""

    def reading(self, shares: np.ndarray) -> Self:
        """The same source, prepared for reading this share [S] float64 of each shard's samples: it fetches a shard
        whole or reads ranges of it."""

    @property
    def files(self) -> Files:
        """The files of its shards. No request is sent."""

    def prefetch(self, file: int) -> int:
        """Fetches a file that is read whole; returns its bytes in the cache, else 0. OSError or UserError for a fault,
        which the read that needs the file will meet again."""


def cache_of(settings: SourceSettings) -> ShardCache:
    """The local folder for indexes and remote files."""
    folder = Path(settings.cache_dir).expanduser() if settings.cache_dir else default_folder()
    return ShardCache(folder, int(settings.cache_gb * 1e9))
