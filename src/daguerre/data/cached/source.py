"""A source whose samples have cached features: in place of the images and captions that were encoded."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from daguerre.data.cached import rows
from daguerre.data.cached.rows import Rows
from daguerre.data.cached.samples import Fact, from_json, to_json
from daguerre.data.images.headers import Undecodable
from daguerre.data.index import file as index_file
from daguerre.data.index import join
from daguerre.data.index.file import About, ShardIndex
from daguerre.data.index.index import Index
from daguerre.data.plan.buckets import Bucket
from daguerre.data.settings import SharedSettings
from daguerre.data.skipped import SkipReport
from daguerre.data.source import Source
from daguerre.types import ALPHA, IMAGE, MASK, OF_TEXTS, REFERENCES, Record

if TYPE_CHECKING:
    from daguerre.data.images.decode import Frame  # imports torch, which a source does without

KIND = "cached set"
SETS = "sets"
_FACTS = ("image", "broken", "said", "full_height", "full_width")
_FURTHER = "further"

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


def text_key(text: str, pictures: Sequence[bytes] = ()) -> bytes:
    """Of a text, and of the reference images that are read with it, by the keys of their parts."""
    return rows.key(text.encode(), *pictures)


Frames = Mapping[str, "Frame"]
"""The part that is taken of each image, by name."""
Mend = Callable[["CachedSource", int, Frames, Bucket, str], "CachedSource"]
"""What `CachedSource.mended` does."""


@dataclass(frozen=True)
class SampleFeatures:
    """Features of one sample."""

    digests: Mapping[str, bytes]
    """Of its images."""
    settings: SharedSettings
    images: Rows | None
    texts: Rows | None
    pictured: bool = False
    """Whether captions are read with the reference images."""

    def keys(self, frames: Frames) -> dict[str, bytes]:
        """The key of the part of each image that is taken."""
        return {
            name: image_key(self.digests[name], frame, self.settings)
            for name, frame in frames.items()
            if name in self.digests
        }

    def text_key(self, frames: Frames, text: str) -> bytes:
        """The key of a caption with these parts of the reference images."""
        return text_key(text, [key for name, key in self.keys(frames).items() if self.pictured and name in REFERENCES])

    def of(self, frames: Frames, text: str) -> dict[str, np.ndarray]:
        """Features of these parts of the images and of a caption, as far as they are cached."""
        found: dict[str, np.ndarray] = {}
        if self.images is not None:
            for image, key in self.keys(frames).items():
                found |= {f"{image}.{name}": array for name, array in self.images.read(key).items()}
        if self.texts is not None:
            row = self.texts.read(self.text_key(frames, text))
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
    further: tuple[str, ...] = ()
    """Further images whose features are cached."""
    pictured: bool = False
    """Whether captions are read with the reference images."""

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
        images = {} if self._rows.about.own.get(_FURTHER) is None else own.images
        return Index(own.ids, starts, own.heights_px, own.widths_px, own.numbers, own.texts, images, own.captioned)

    @cached_property
    def _columns(self) -> Mapping[str, pa.Array]:
        """The columns that each sample is asked for, checked once."""
        further = [_FURTHER] if _FURTHER in self._rows.about.own else []
        names = ("id", "name", *_FACTS, *further, *map(_number, self.columns))
        return {name: self._rows.column(name) for name in names}

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
        if texts is None:
            return None
        further = self._columns[_FURTHER][number].as_py() if _FURTHER in self._columns else None
        return Fact(image, height, width, json.loads(texts), broken, from_json(further))

    def features_of(self, fact: Fact) -> SampleFeatures:
        """The features of a sample with these facts."""
        digests = {name: one.digest for name, one in fact.pictures.items() if name == IMAGE or name in self.further}
        return SampleFeatures(digests, self.settings, self.images, self.texts, self.pictured)

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
            if self.settings.alpha_mask and MASK in self.reads:
                images[ALPHA] = held[IMAGE]
        sizes = {name: one[1:] for name, one in fact.pictures.items() if name == IMAGE or name in self.further}
        metadata = {name: self._columns[_number(name)][number].as_py() for name in self.columns}
        return Record(self.name(number), images, fact.texts, metadata, sizes, self.features_of(fact))

    def features(self, height_px: int, width_px: int) -> dict[str, np.ndarray]:
        told = dict(self.shapes).get((height_px, width_px), {})
        return {name: np.zeros(shape, dtype) for name, (shape, dtype) in told.items()}

    def mended(self, number: int, frames: Frames, bucket: Bucket, text: str) -> "CachedSource":
        assert self.mend is not None, "it is another process that has the encoders"
        return self.mend(self, number, frames, bucket, text)

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
        "id": pa.array(index.ids[:]),
        "height": pa.array(index.heights_px[:]),
        "width": pa.array(index.widths_px[:]),
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
    further = sorted({name for fact in facts.values() for name in fact.further})
    if further:
        held = [fact and to_json(fact.further) for fact in map(facts.get, range(count))]
        columns[_FURTHER] = pa.array(held, pa.string())
        for name in further:
            has = (fact is not None and name in fact.further for fact in map(facts.get, range(count)))
            columns[f"i:{name}"] = pa.array(list(has), pa.bool_())
    fields_kept = tuple(sorted({*index.numbers, *index.texts}))
    own: dict[str, Any] = {"shard_starts": index.shard_starts.tolist()}
    own |= {_FURTHER: further} if further else {}
    return index_file.encoded(
        ShardIndex(pa.table(columns), About(KIND, about, 0, "0" * 32, fields=fields_kept, own=own))
    )
