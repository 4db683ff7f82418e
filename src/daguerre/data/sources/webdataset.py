"""Tar shards as webdataset and img2dataset write them, local or remote: settings and source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from daguerre.data import class_labels, skipped
from daguerre.data.class_labels import Classes, Labels
from daguerre.data.images import headers
from daguerre.data.images.headers import Undecodable
from daguerre.data.index import cache as index_cache
from daguerre.data.index.cache import ShardIndex
from daguerre.data.index.index import Index, Stored, part_of
from daguerre.data.settings import SourceSettings
from daguerre.data.skipped import SkipReport
from daguerre.data.source import WHOLE_SHARE, Files, Split, cache_of
from daguerre.data.tar import index as tar_index
from daguerre.data.tar import samples
from daguerre.data.tar.index import IMAGE_MARK
from daguerre.errors import UserError
from daguerre.settings import ADDRESS, FREE
from daguerre.storage import expand
from daguerre.storage import io as storage_io
from daguerre.storage.file_cache import ShardCache
from daguerre.storage.location import Location
from daguerre.storage.pipes import FILES
from daguerre.types import IMAGE, Record

GAP_BYTES = 1 << 20
"""Most bytes between the members of a sample that are read with them in one request."""
DIFFERENT = "bytes differ from the index: damaged, cut off or replaced since the shard was indexed"
_READINGS = 6
LAYOUT = """Expected in a tar: images (JPEG, PNG or WebP), each with other members of the same name,
  000012.jpg   000012.txt   (a caption, UTF-8)   or   000012.json   {"caption": "a cat", ...}
  000012.jpg   000012.cls   (a class; data.idx_to_prompt gives its words)"""


class Settings(SourceSettings):
    """Tar shards: local, `s3://`, `gs://`, `http(s)://`; brace ranges, globs, folders, and lists of these."""

    source: Literal["webdataset"] = "webdataset"
    """Name of this source."""
    path: Annotated[str | tuple[str, ...], FILES, ADDRESS] = Field(min_length=1, json_schema_extra=FREE)
    """The shards: `part-{00000..00099}.tar`, `DIR/*.tar`, `DIR`, `s3://BUCKET/PREFIX/`, or a list. They may move
    between two starts: samples are known by their contents."""
    idx_to_prompt: Labels | None = None
    """Words for the classes (members `cls`): a JSON file with a map or list, the map or list itself, or `imagenet`."""


@dataclass(frozen=True)
class _WithUsual(Stored):
    """The columns of an index that say which samples have a caption field, with `text` where any field has the usual
    caption: indexes that are older than this rule lack it. Read when asked for: there may be many."""

    held: Mapping[str, pa.Array]
    names: tuple[str, ...]
    """Fields with the usual caption."""

    def part(self, start: int, stop: int) -> Mapping[str, pa.Array]:
        """The same of the samples `start` to `stop`."""
        return replace(self, held=part_of(self.held, start, stop))

    @property
    def _usual(self) -> list[str]:
        return [name for name in self.names if name in self.held]

    def __getitem__(self, name: str) -> pa.Array:
        if name != "text" or not self._usual:
            return self.held[name]
        return reduce(pc.or_, (self.held[usual] for usual in self._usual))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.held, *["text"] * bool(self._usual)]))

    def __len__(self) -> int:
        return len(list(iter(self)))


class Piece(NamedTuple):
    """Stored bytes of a sample: an image (its name after `IMAGE_MARK`) or one of its texts."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, eq=False)
class WebdatasetSource:
    """The samples of all shards, in the order of the shards and of the images in them."""

    locations: tuple[Location, ...]
    paths: tuple[Path, ...]
    """Index files, one a shard."""
    starts: np.ndarray
    """[S + 1] int64: the first sample of each shard, and N."""
    prompts: Classes | None
    """Words for the classes."""
    cache: ShardCache
    whole: np.ndarray
    """[S] bool: remote shards that are fetched whole."""
    metric: str | None = None

    @cached_property
    def index(self) -> Index:
        index = index_cache.combined(self.paths)
        names = (*samples.CAPTIONS, *["cls"] * (self.prompts is not None))
        return replace(index, captioned=_WithUsual(index.captioned, names)) if index.captioned else index

    def __getstate__(self) -> dict[str, Any]:
        # Of the fields alone: threads add what is made late while this goes through them.
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def stamps(self) -> np.ndarray:
        """Of the sample's digest, and size and version of its shard."""
        return index_cache.stamps(self.locations, self.paths)

    def caption_digests(self) -> np.ndarray | None:
        """Of images and texts, where `data pack` has given the ids."""
        return index_cache.digests_of_given_ids(self.paths, "offset")

    def sample_id(self, number: int) -> int:
        """63-bit hash of the shard's contents and the place in it; or the id in its JSON, from `data pack`."""
        shard, row = self._where(number)
        return int(self._shard(shard).column("id")[row].as_py())

    def name(self, number: int) -> str:
        """Shard, place in it, and the name of its members."""
        shard, row = self._where(number)
        return f"{self.locations[shard].name}[{row}] {self._shard(shard).column('key')[row].as_py()}"

    def record(self, number: int) -> Record:
        """The bytes of a sample. `Undecodable` if they differ from the index."""
        shard, row = self._where(number)
        index = self._shard(shard)
        pieces = _pieces(index, row)
        read = self._read(shard, pieces, index.column("digest")[row].as_py())
        parts = {piece.name: data for piece, data in zip(pieces, read, strict=True)}
        images = {name: parts.pop(name) for name in list(parts) if name.startswith(IMAGE_MARK)}
        try:
            words = samples.words(parts)
        except samples.Unusable as error:  # of an older version's index
            raise Undecodable(str(error)) from error
        images = {name.removeprefix(IMAGE_MARK): data for name, data in images.items()}
        return Record(self.name(number), images, self._captions(words.texts), words.metadata)

    def report(self) -> SkipReport:
        """Samples that were unusable when the shards were indexed, and shards that changed since."""
        return skipped.merged(index_cache.left_out(self.paths), index_cache.changed(self.locations, self.paths))

    def reading(self, shares: np.ndarray) -> WebdatasetSource:
        """The source, fetching shards whole by the share [S] that is read of each."""
        prepared = replace(self, whole=shares >= WHOLE_SHARE)
        if "index" in self.__dict__:
            prepared.__dict__["index"] = self.index
        return prepared

    @property
    def is_remote(self) -> bool:
        return any(location.scheme for location in self.locations)

    @cached_property
    def files(self) -> Files:
        """One a shard."""
        sizes = np.zeros(len(self.locations), dtype=np.int64)
        for i, (location, path) in enumerate(zip(self.locations, self.paths, strict=True)):
            if location.local is None and self.whole[i]:
                sizes[i] = index_cache.head(path).about.shard_bytes
        return Files(np.arange(len(sizes), dtype=np.int64), sizes)

    def prefetch(self, file: int) -> int:
        """Fetches a remote shard that is read whole into the cache; returns its size in bytes."""
        size = int(self.files.sizes_bytes[file])
        if size:
            self.cache.path(self.locations[file], self._shard(file).about.shard_digest)
        return size

    def _where(self, number: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self.starts, number, side="right")) - 1
        return shard, number - int(self.starts[shard])

    def _shard(self, shard: int) -> ShardIndex:
        return index_cache.load(self.paths[shard])

    def _captions(self, texts: Mapping[str, str]) -> Mapping[str, str]:
        """The captions with the class label in words, which is the caption if there is no other."""
        if self.prompts is None or "cls" not in texts:
            return texts
        prompt = self.prompts.text(texts["cls"])
        return {"text": prompt, **texts, "cls": prompt}

    def _read(self, shard: int, pieces: Sequence[Piece], digest: int) -> list[bytes]:
        """The bytes of a sample, checked by the digest of the index."""
        first = min(piece.offset for piece in pieces)
        length = max(piece.offset + piece.size for piece in pieces) - first

        def cut(data: bytes) -> list[bytes]:
            return [data[piece.offset - first :][: piece.size] for piece in pieces]

        try:
            if length - sum(piece.size for piece in pieces) <= GAP_BYTES:
                return cut(self._range(shard, first, length, lambda data: tar_index.digest(cut(data)) == digest))
            return self._apart(shard, pieces, digest)
        except storage_io.Mismatch as error:
            raise Undecodable(DIFFERENT) from error

    def _apart(self, shard: int, pieces: Sequence[Piece], digest: int) -> list[bytes]:
        """Members that are far apart; read again if bytes were damaged in transit."""
        before = None
        for _ in range(_READINGS):
            data = [self._range(shard, piece.offset, piece.size) for piece in pieces]
            found = tar_index.digest(data)
            if found == digest:
                return data
            if found == before:
                break
            before = found
        raise Undecodable(DIFFERENT)

    def _range(self, shard: int, start: int, length: int, check: Callable[[bytes], bool] | None = None) -> bytes:
        location = self.locations[shard]
        if location.local is not None or not self.whole[shard]:
            with suppress(storage_io.NoRanges):
                return storage_io.read(location, start, length, check)
        return self.cache.read(location, start, length, self._shard(shard).about.shard_digest, check)


def open_source(settings: Settings, split: Split) -> WebdatasetSource:
    """Finds the shards and their indexes; makes those that are missing. UserError if there are no samples."""
    found = expand.expand(settings.path)
    make = builder(settings)
    paths = index_cache.indexes(found, make.kind, make, make.cache.folder)
    prompts = None if settings.idx_to_prompt is None else class_labels.opened(settings.idx_to_prompt)
    counts = [index_cache.head(path).count for path in paths]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    source = WebdatasetSource(tuple(found), tuple(paths), starts, prompts, make.cache, np.zeros(len(found), bool))
    if not starts[-1]:
        left_out = skipped.table(source.report())
        instead = f" Found instead:\n{left_out}" if left_out else ""
        several = f"any of the {len(found):,} shards, {found[0].name} and so on"
        where = found[0].name if len(found) == 1 else several
        what = f"data.path: no image with a caption in {where}.{instead}\n{LAYOUT}"
        raise UserError(what, code="empty", setting="data.path")
    _check_classes(settings, source)
    return source


def builder(settings: Settings) -> Build:
    """The builder of indexes under these settings."""
    return Build(settings.formats, cache_of(settings))


@dataclass(frozen=True)
class Build:
    """Makes the index of a shard; a remote one is fetched whole for it."""

    formats: tuple[str, ...]
    cache: ShardCache

    @property
    def kind(self) -> str:
        return tar_index.kind(self.formats)

    def __call__(self, location: Location) -> ShardIndex:
        return build(location, self.formats, self.cache)


def build(location: Location, formats: Sequence[str] = headers.USUAL, cache: ShardCache | None = None) -> ShardIndex:
    """The index of one shard, made again. UserError for a file that is not a tar."""

    def made(local: Path) -> ShardIndex:
        return tar_index.build(local, location.name, formats, storage_io.size(location).version)

    if location.local is not None:
        return made(location.local)
    assert cache is not None, "a remote shard is indexed through the cache"
    return cache.using(location, made)


def _pieces(shard: ShardIndex, row: int) -> list[Piece]:
    """The stored parts of a sample, its image first."""
    names = shard.about.own["names"]
    image = Piece(IMAGE_MARK + IMAGE, shard.column("offset")[row].as_py(), shard.column("size")[row].as_py())
    parts = shard.column("parts")[row].as_py()
    return [image, *(Piece(names[part["name"]], part["offset"], part["size"]) for part in parts)]


def _check_classes(settings: Settings, source: WebdatasetSource) -> None:
    """UserError for classes without words, or words without classes."""
    columns = {name for path in source.paths for name in index_cache.head(path).columns}
    held = {name.removeprefix("c:") for name in columns if name.startswith("c:")}
    fields = held | {"text"} if held & {*samples.CAPTIONS} else held
    if settings.idx_to_prompt is not None and "cls" not in fields:
        what = "data.idx_to_prompt has no effect: no sample has a class (a member .cls); remove it"
        raise UserError(what, code="unused", setting="data.idx_to_prompt")
    if settings.idx_to_prompt is None and "cls" in fields and not fields & set(settings.captions.fields):
        raise UserError(
            "data.idx_to_prompt: the samples have classes (members .cls) but no captions: give a text for each "
            "class: a JSON file with a map or list, or `imagenet`",
            code="missing",
            setting="data.idx_to_prompt",
        )
