"""The facts of a source that planning uses without reading an image: ids, sizes and the metadata columns in use.

Order, filters and buckets of every epoch follow from this alone. How an index is made and kept is the sources' affair.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

PART_SAMPLES = 1 << 20
"""Samples of a large set that are worked on at a time."""


class Column(Protocol):
    """A number of each sample: an array, or what reads like one and is in files. `column[:]` is all of it in memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Any: ...


class Stored(Mapping[str, pa.Array]):
    """Columns by name that are in files, and read when they are asked for."""

    @abstractmethod
    def part(self, start: int, stop: int) -> Mapping[str, pa.Array]:
        """The same columns of the samples `start` to `stop`."""


class Large(NamedTuple):
    """The mark of a set whose columns stay in its files. The samples chosen of it are kept in a file, too."""

    digest: str
    """Of all the index files."""
    check: Callable[[Column], None]
    """UserError where a sample is there twice, by the ids of all."""


@dataclass(frozen=True)
class Index:
    """N samples in S shards, in the source's own order; the samples of a shard stand together."""

    ids: Column
    """[N] int64: a stable 63-bit id a sample, each once; of a billion, two may share one by chance."""
    shard_starts: np.ndarray
    """[S + 1] int64: the first sample of each shard, and N."""
    heights_px: Column
    """[N] int32, after EXIF rotation; 0 where it is not known."""
    widths_px: Column
    """[N] int32, after EXIF rotation; 0 where it is not known."""
    numbers: Mapping[str, pa.Array] = field(default_factory=dict)
    """Metadata that filters can use: float64 [N] by name, null where missing; true is 1, false 0."""
    texts: Mapping[str, pa.Array] = field(default_factory=dict)
    """The same for metadata that is text: large_string [N] by name. A field may be a number here and a text there."""

    images: Mapping[str, pa.Array] | None = None
    """bool [N] by name: whether the sample has this further image; no sample has what is not named. None:
    not known."""
    captioned: Mapping[str, pa.Array] = field(default_factory=dict)
    """bool [N] by caption field: whether the sample has text in it. Empty: not known of any field."""
    held_out: np.ndarray | None = None
    """[N] bool: what the source itself keeps out of training. None: drawn by `held_out_fraction`."""
    large: Large | None = None
    """None: small enough for the memory of each process."""

    @property
    def count(self) -> int:
        return len(self.ids)

    def parts(self) -> Iterator[Index]:
        """Stretches of the samples, one behind the other, each an index of one shard whose sizes and ids are in memory;
        a small set is one."""
        if self.count <= PART_SAMPLES:
            yield self
            return
        for start in range(0, self.count, PART_SAMPLES):
            stop = min(start + PART_SAMPLES, self.count)
            yield Index(
                self.ids[start:stop],
                np.array([0, stop - start]),
                self.heights_px[start:stop],
                self.widths_px[start:stop],
                part_of(self.numbers, start, stop),
                part_of(self.texts, start, stop),
                None if self.images is None else part_of(self.images, start, stop),
                part_of(self.captioned, start, stop),
                None if self.held_out is None else self.held_out[start:stop],
            )


def part_of(columns: Mapping[str, pa.Array], start: int, stop: int) -> Mapping[str, pa.Array]:
    """The same columns of the samples `start` to `stop`."""
    if isinstance(columns, Stored):
        return columns.part(start, stop)
    return {name: column.slice(start, stop - start) for name, column in columns.items()}
