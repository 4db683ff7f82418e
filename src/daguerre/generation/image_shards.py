"""Generated images as tar shards that webdataset and our own source read, with an index next to each and a
dataset.json.

A shard holds a range of the list's numbers, whoever generates it, and gets its name once it is whole. The index holds
the shard's digest, which tells whether it is whole.
"""

import json
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import blake2b
from itertools import groupby
from typing import Any, BinaryIO

import numpy as np

from daguerre.checkpoint.atomic import locked
from daguerre.data.images import headers
from daguerre.data.index import cache
from daguerre.data.index.cache import SUFFIX, BadIndex
from daguerre.data.skipped import SkipReport
from daguerre.data.tools import pack
from daguerre.data.tools.manifest import Listing
from daguerre.data.tools.pack import Packed, Packer, Shard
from daguerre.generation.contact_sheet import Example
from daguerre.generation.generate import GeneratedImage, in_order
from daguerre.generation.image_files import Encoding, image_document, in_threads
from daguerre.generation.jobs import Describe, Generate, Output
from daguerre.tracking.progress import Counter
from daguerre.types import IMAGE, Record

_LISTING_PAUSE = 20
"""Listing shards reads the index of each: this many times as long passes before they are listed again."""


@dataclass
class ShardOutput(Output):
    """A tar shard for each range of the list."""

    encoding: Encoding = field(default_factory=Encoding)
    written: int = 0
    """Images of shards that were finished since."""
    _complete: frozenset[str] = frozenset()

    @property
    def share(self) -> int:
        return sum(len(shard.numbers) for shard in self._own().values())

    def find_existing(self) -> None:
        """Finds the shards of this part that are there, by every byte."""
        whole = []
        with Counter("checking existing shards", self.share, unit="images") as counter:
            for shard in self._own().values():
                packed, path = self._indexed(shard), self.folder / shard.name
                if packed is not None and path.is_file() and cache.file_digest(path) == packed.digest:
                    whole.append(shard)
                counter.add(len(shard.numbers))
        self._complete = frozenset(shard.name for shard in whole)
        self.kept = sum(len(shard.numbers) for shard in whole)

    def write(self, generate: Generate, describe: Describe) -> None:
        """Generates and writes the rest of this part."""
        self._list_up()
        own = {i: shard for i, shard in self._own().items() if shard.name not in self._complete}
        listed_until = 0.0
        for i, requests in groupby(self.requests, lambda one: one.number // self._size):
            if i in own:
                self.written += self._pack(own[i], in_order(generate, requests), describe).samples
                if (begun := time.monotonic()) >= listed_until:
                    self._list_up()
                    listed_until = begun + _LISTING_PAUSE * (time.monotonic() - begun)

    def missing(self) -> int:
        """Images of the whole list that are not there; by names alone, as other parts looked at theirs."""
        if self._list_up():
            return 0
        return sum(len(shard.numbers) for shard in self._shards if not (self.folder / shard.name).is_file())

    def examples(self) -> Iterator[Example]:
        """Some images of the whole list, evenly spread."""
        inputs = {one.number: tuple(one.images.values()) for one in self.requests if one.number in self.shown}
        for shard in self._shards:
            numbers = [number for number in shard.numbers.tolist() if number in self.shown]
            for number, image, known in self._read(shard, numbers):
                size_px = known["height"], known["width"]
                name = f"{shard.name}, {number:09d}"
                yield Example(image, known["prompt"], known["seed"], size_px, name, None, inputs[number])

    def images(self, number: int) -> list[bytes]:
        """The image files of finished shard `number`, in the order of the list."""
        shard = self._shards[number]
        return [image for _, image, _ in self._read(shard, shard.numbers.tolist())]

    def where(self) -> str:
        """The place of the images, for people."""
        shards = f"{len(self._shards):,} shards" if len(self._shards) > 1 else "one shard"
        return (
            f"{self.folder}: {self.total:,} images in {shards}; train on them with data.source=webdataset "
            f"data.path={shlex.quote(str(self.folder))}"
        )

    def saved(self, generated: int) -> str:
        """For people: how much is kept of so many images that were generated when a signal came."""
        lost = generated - self.written
        return f"{self.written:,} images are in finished shards, {lost:,} of the unfinished shard are lost"

    @property
    def _size(self) -> int:
        return int(self.parameters["shard_samples"])

    @cached_property
    def _shards(self) -> list[Shard]:
        return pack.shards(np.arange(self.total), self._size)

    def _own(self) -> dict[int, Shard]:
        return {i: shard for i, shard in enumerate(self._shards) if i in self.part}

    def _pack(self, shard: Shard, images: Iterable[GeneratedImage], describe: Describe) -> Packed:
        """Writes a shard of images that come in the order of its numbers, and its index."""
        source = _Arriving(in_threads(partial(self._record, describe), images))
        steps = Packer(source, headers.USUAL, str(self.folder))(shard)
        while True:
            try:
                next(steps)
            except StopIteration as stopped:
                packed: Packed = stopped.value[0]
                return packed

    def _record(self, describe: Describe, image: GeneratedImage) -> tuple[int, Record]:
        one = image.request
        metadata = image_document(describe(one), image) | ({"file_name": one.name} if one.name else {})
        caption = one.prompt.text if one.prompt.text.strip() else ""
        pixels = self.encoding(image.pixels_HWC)
        return one.number, Record(str(one.number), {IMAGE: pixels}, {"text": caption}, metadata)

    def _list_up(self) -> bool:
        """Writes dataset.json from the indexes that are there; returns whether every shard is. Of several processes the
        last one to come finds all of them."""
        fingerprint = blake2b(json.dumps(dict(self.parameters), sort_keys=True).encode(), digest_size=16).hexdigest()
        made_of = {
            "fingerprint": fingerprint,
            "samples_per_shard": self._size,
            "order": "source",
            "source": {"source": "generate", **self.parameters},
            "samples_of_source": self.total,
            "left_out": {},
        }
        with locked(self.folder):
            listing = Listing(str(self.folder), made_of, len(self._shards))
            listing.done = {shard.name: packed for shard in self._shards if (packed := self._indexed(shard))}
            complete = len(listing.done) == len(self._shards)
            listing.save(complete)
        return complete

    def _indexed(self, shard: Shard) -> Packed | None:
        """A finished shard by its index alone."""
        try:
            index = cache.load(self.folder / (shard.name + SUFFIX))
            about = index.about
        except (FileNotFoundError, BadIndex):
            return None
        return Packed(shard.name, index.table.num_rows, about.shard_bytes, about.shard_digest)

    def _read(self, shard: Shard, numbers: Sequence[int]) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
        """(number, image, JSON) of some images of a finished shard."""
        if not numbers:
            return
        index = cache.load(self.folder / (shard.name + SUFFIX))
        names = index.about.own["names"]
        with (self.folder / shard.name).open("rb") as file:
            for number in numbers:
                row = index.table.slice(number - shard.first, 1).to_pylist()[0]
                document = next(part for part in row["parts"] if names[part["name"]] == "json")
                yield number, _bytes(file, row), json.loads(_bytes(file, document))


@dataclass
class _Arriving:
    """A source of records that come one after the other and are asked for in that order."""

    records: Iterator[tuple[int, Record]]
    index: None = None
    metric: str | None = None

    def sample_id(self, number: int) -> int:
        """The image's number in the list: the same whoever generates it."""
        return number

    def name(self, number: int) -> str:
        return f"image {number}"

    def record(self, number: int) -> Record:
        found, record = next(self.records)
        assert found == number, f"image {found} came in place of {number}"
        return record

    def report(self) -> SkipReport:
        return {}


def _bytes(file: BinaryIO, where: Mapping[str, Any]) -> bytes:
    file.seek(where["offset"])
    return file.read(where["size"])
