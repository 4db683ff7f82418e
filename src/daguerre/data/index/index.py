"""The facts of a source that planning uses without reading an image: ids, sizes and the metadata columns in use.

Order, filters and buckets of every epoch follow from this alone. How an index is made and kept is the sources' affair.
"""

from collections.abc import Mapping
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

    images: Mapping[str, pa.Array] | None = None
    """bool [N] by name: whether the sample has this further image; no sample has what is not named. None:
    not known."""
    captioned: Mapping[str, pa.Array] = field(default_factory=dict)
    """bool [N] by caption field: whether the sample has text in it. Empty: not known of any field."""
    held_out: np.ndarray | None = None
    """[N] bool: what the source itself keeps out of training. None: drawn by `held_out_fraction`."""

    @property
    def count(self) -> int:
        return len(self.ids)
