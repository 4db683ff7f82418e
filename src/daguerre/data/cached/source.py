"""A source whose samples have cached features: in place of the images and captions that were encoded."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from daguerre.data.cached import rows
from daguerre.data.cached.rows import Rows
from daguerre.data.cached.samples import Fact
from daguerre.data.images.headers import Undecodable
from daguerre.data.index import file as index_file
from daguerre.data.index import join
from daguerre.data.index.file import About, ShardIndex
from daguerre.data.index.index import Index
from daguerre.data.plan.buckets import Bucket
from daguerre.data.settings import SharedSettings
from daguerre.data.skipped import SkipReport
from daguerre.data.source import Source
from daguerre.types import IMAGE, OF_IMAGES, OF_TEXTS, Record

if TYPE_CHECKING:
    from daguerre.data.images.decode import Frame  # imports torch, which a source does without

KIND = "cached set"
SETS = "sets"
_FACTS = ("image", "broken", "said", "full_height", "full_width")

Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and type of each feature by name."""


def _number(column: str) -> str:
    """The column of a table of facts that holds a number of the metadata."""
    return f"n:{column}"


def image_digest(image: bytes | np.ndarray) -> bytes:
    """Of the bytes of an image file, or of pixels."""
    return rows.key(image) if isinstance(image, bytes) else rows.key(repr(image.shape).encode(), image.tobytes())


def image_key(image: bytes, frame: "Frame", settings: SharedSettings) -> bytes:
    """Of the part of an image, by the digest of its bytes, that a frame takes."""
    box = (*frame.resized, frame.top, frame.left, frame.height_px, frame.width_px, int(frame.mirror))
    return rows.key(image, json.dumps([*box, frame.interpolation, settings.alpha_colour]).encode())


def text_key(text: str) -> bytes:
    return rows.key(text.encode())


Mend = Callable[["CachedSource", int, "Frame", Bucket, str], "CachedSource"]
"""What `CachedSource.mended` does."""


@dataclass(frozen=True)
class SampleFeatures:
    """Features of one sample."""

    image: bytes
    settings: SharedSettings
    images: Rows | None
    texts: Rows | None

    def of(self, frame: "Frame", text: str) -> dict[str, np.ndarray]:
        """Features of a part of the image and of a caption, as far as they are cached."""
        found: dict[str, np.ndarray] = {}
        if self.images is not None:
            row = self.images.read(image_key(self.image, frame, self.settings))
            found |= {OF_IMAGES + name: array for name, array in row.items()}
        if self.texts is not None:
            row = self.texts.read(text_key(text))
            found |= {OF_TEXTS + name: array for name, array in row.items()}
        return found


@dataclass(frozen=True)
class CachedSource:
    """The samples of a source, of which only what is not cached is read."""

    inner: Source | None
    """The source itself; None where a cache alone is the source."""
    table: Path
    """Facts of all its samples, in its order (`table`)."""
    settings: SharedSettings
    images: Rows | None = None
    texts: Rows | None = None
    reads: tuple[str, ...] = ()
    """Images that are read in addition to what is cached."""
    shapes: tuple[tuple[tuple[int, int], Shapes], ...] = ()
    """Features of images of each height and width."""
    mend: Mend | None = field(default=None, compare=False, repr=False)
    """Encodes rows again, in the process that has the encoders: it stays there."""
    columns: tuple[str, ...] = ()
    """Numbers of the metadata that a record has."""

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"mend": None}

    @cached_property
    def _rows(self) -> ShardIndex:
        return index_file.load(self.table)

    @cached_property
    def index(self) -> Index | None:
        if self.inner is not None:
            return self.inner.index
        own, known = join.combined([self.table]), self._rows.about.own
        starts = np.array(known["shard_starts"], dtype=np.int64)
        return Index(own.ids, starts, own.heights_px, own.widths_px, own.numbers, own.texts, {}, own.captioned)

    @cached_property
    def _columns(self) -> Mapping[str, pa.Array]:
        """The columns that each sample is asked for, checked once."""
        return {name: self._rows.column(name) for name in ("id", "name", *_FACTS, *map(_number, self.columns))}

    @property
    def metric(self) -> str | None:
        return None

    def sample_id(self, number: int) -> int:
        return int(self._columns["id"][number].as_py())

    def name(self, number: int) -> str:
        return str(self._columns["name"][number].as_py())

    def fact(self, number: int) -> Fact | None:
        """The facts of a sample; None for one that was not chosen when the cache was filled."""
        image, broken, texts, height, width = (self._columns[name][number].as_py() for name in _FACTS)
        return None if texts is None else Fact(image, height, width, json.loads(texts), broken)

    def record(self, number: int) -> Record:
        fact = self.fact(number)
        if fact is None:
            raise Undecodable("not in the cache: it was filled with other filters or another split")
        if fact.broken:
            raise Undecodable(fact.broken)
        images: Mapping[str, Any] = {}
        if self.reads and self.inner is not None:
            held = self.inner.record(number).images
            images = {name: held[name] for name in self.reads if name in held}
        features = SampleFeatures(fact.image, self.settings, self.images, self.texts)
        metadata = {name: self._columns[_number(name)][number].as_py() for name in self.columns}
        return Record(self.name(number), images, fact.texts, metadata, {IMAGE: (fact.height, fact.width)}, features)

    def features(self, height_px: int, width_px: int) -> dict[str, np.ndarray]:
        told = dict(self.shapes).get((height_px, width_px), {})
        return {name: np.zeros(shape, dtype) for name, (shape, dtype) in told.items()}

    def mended(self, number: int, frame: "Frame", bucket: Bucket, text: str) -> "CachedSource":
        assert self.mend is not None, "it is another process that has the encoders"
        return self.mend(self, number, frame, bucket, text)

    def report(self) -> SkipReport:
        return {} if self.inner is None else self.inner.report()


def table(source: Source, index: Index, facts: Mapping[int, Fact], about: str) -> bytes:
    """A file with the facts of a source's samples by number, and all that planning and filters use of its index."""
    count = index.count

    def of(name: str, kind: pa.DataType) -> pa.Array:
        known = (facts.get(number) for number in range(count))
        return pa.array([None if fact is None else getattr(fact, name) for fact in known], kind)

    said = [json.dumps(fact.texts) if (fact := facts.get(number)) else None for number in range(count)]
    names = [source.name(number) if number in facts else "" for number in range(count)]
    columns = {
        "id": pa.array(index.ids),
        "height": pa.array(index.heights_px),
        "width": pa.array(index.widths_px),
        "digest": np.zeros(count, dtype=np.uint64),
        "image": of("image", pa.binary()),
        "full_height": of("height", pa.int32()),
        "full_width": of("width", pa.int32()),
        "broken": of("broken", pa.string()),
        "said": pa.array(said, pa.string()),
        "name": pa.array(names, pa.string()),
        **{f"n:{name}": index.numbers[name] for name in index.numbers},
        **{f"s:{name}": pc.cast(index.texts[name], pa.string()) for name in index.texts},
        **{f"c:{name}": index.captioned[name] for name in index.captioned},
    }
    fields_kept = tuple(sorted({*index.numbers, *index.texts}))
    own = {"shard_starts": index.shard_starts.tolist()}
    return index_file.encoded(
        ShardIndex(pa.table(columns), About(KIND, about, 0, "0" * 32, fields=fields_kept, own=own))
    )
