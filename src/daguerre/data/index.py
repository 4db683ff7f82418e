"""What planning knows of a source without reading a picture: ids, sizes and the metadata columns in use.

Order, filters and buckets of every epoch follow from this alone. How an index is made and kept is the sources' affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class Index:
    """N samples in S shards, in the source's own order; the samples of a shard stand together."""

    ids: np.ndarray
    """[N] int64: a stable 63-bit id a sample, each once; of a billion, two may share one by chance."""
    shard_starts: np.ndarray
    """[S + 1] int64: the first sample of each shard, and N."""
    heights_px: np.ndarray
    """[N] int32, after EXIF rotation; 0 where it is not known."""
    widths_px: np.ndarray
    """[N] int32, after EXIF rotation; 0 where it is not known."""
    numbers: Mapping[str, pa.Array] = field(default_factory=dict)
    """Metadata that filters can use: float64 [N] by name, null where missing; true is 1, false 0."""
    texts: Mapping[str, pa.Array] = field(default_factory=dict)
    """The same for metadata that is text: large_string [N] by name. A field may be a number here and a text there."""

    captioned: Mapping[str, pa.Array] = field(default_factory=dict)
    """bool [N] by caption field: whether the sample has text in it. Empty: not known of any field."""

    @property
    def count(self) -> int:
        """N."""
        return len(self.ids)


def concatenated(indexes: Sequence[Index]) -> Index:
    """The indexes of several sources one after the other; a column that one of them lacks is null there."""
    counts = [index.count for index in indexes]
    starts = [index.shard_starts[:-1] + first for index, first in zip(indexes, _firsts(counts), strict=True)]
    return Index(
        ids=np.concatenate([index.ids for index in indexes]),
        shard_starts=np.concatenate([*starts, [sum(counts)]]).astype(np.int64),
        heights_px=np.concatenate([index.heights_px for index in indexes]),
        widths_px=np.concatenate([index.widths_px for index in indexes]),
        numbers=_columns([index.numbers for index in indexes], counts, pa.float64()),
        texts=_columns([index.texts for index in indexes], counts, pa.large_string()),
    )


def _firsts(counts: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(counts)[:-1].tolist()]


def _columns(
    columns: Sequence[Mapping[str, pa.Array]], counts: Sequence[int], kind: pa.DataType
) -> dict[str, pa.Array]:
    names = dict.fromkeys(name for mapping in columns for name in mapping)
    return {
        name: pa.concat_arrays(
            [
                mapping.get(name, pa.nulls(count, kind)).cast(kind)
                for mapping, count in zip(columns, counts, strict=True)
            ]
        )
        for name in names
    }
