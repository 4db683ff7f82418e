"""Drawn pictures as tar shards that webdataset and our own source read, with an index beside each and a dataset.json.

A shard holds a stretch of the list's numbers, whoever draws it, and has its name once it is whole; what is whole is
told by the index, which holds the shard's digest.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from daguerre.data.images import headers
from daguerre.data.index import cache
from daguerre.data.index.cache import SUFFIX, BadIndex
from daguerre.data.skipped import SkipReport
from daguerre.data.tools import pack
from daguerre.data.tools.manifest import Listing
from daguerre.data.tools.pack import Packed, Packer, Shard
from daguerre.generation.generate import Drawn, Wanted
from daguerre.generation.image_files import Encoding, described, in_threads
from daguerre.types import IMAGE, Record


@dataclass(frozen=True)
class Shards:
    """The pictures of a list in shards of one folder."""

    folder: Path
    total: int
    """Pictures of the whole list, over all ranks."""
    samples_per_shard: int
    encoding: Encoding
    about: Callable[[Wanted], dict[str, Any]]
    """What the JSON of a picture says."""
    asked: Mapping[str, Any]
    """What decides the pictures; dataset.json says it as their source."""

    def all(self) -> list[Shard]:
        """Every shard of the list, in order: as records, it holds the numbers of its pictures."""
        return pack.shards(np.arange(self.total), self.samples_per_shard)

    def is_whole(self, shard: Shard) -> bool:
        """Whether a shard is there, every byte as it was written."""
        packed = self._indexed(shard)
        path = self.folder / shard.name
        return packed is not None and path.is_file() and cache.file_digest(path) == packed.digest

    def write(self, shard: Shard, drawn: Iterable[Drawn]) -> Packed:
        """Writes a shard of pictures that come in the order of its numbers, and its index."""
        source = _Arriving(in_threads(self._record, drawn))
        packer = Packer(source, headers.USUAL, str(self.folder))
        steps = packer(shard)
        while True:
            try:
                next(steps)
            except StopIteration as stopped:
                packed: Packed = stopped.value[0]
                return packed

    def list_up(self) -> bool:
        """Writes dataset.json from the indexes that are there; whether every shard is. Of several ranks the last one
        to come finds all of them."""
        shards = self.all()
        with _alone(self.folder):
            listing = Listing(str(self.folder), self._made_of(), len(shards))
            listing.done = {shard.name: packed for shard in shards if (packed := self._indexed(shard)) is not None}
            complete = len(listing.done) == len(shards)
            listing.save(complete)
        return complete

    def read(self, shard: Shard, numbers: Sequence[int]) -> Iterator[tuple[int, bytes, bytes]]:
        """(number, picture, JSON) of some pictures of a finished shard."""
        if not numbers:
            return
        index = cache.load(self.folder / (shard.name + SUFFIX))
        names = index.about.own["names"]
        with (self.folder / shard.name).open("rb") as file:
            for number in numbers:
                row = index.table.slice(number - shard.first, 1).to_pylist()[0]
                document = next(part for part in row["parts"] if names[part["name"]] == "json")
                yield number, _bytes(file, row), _bytes(file, document)

    def _indexed(self, shard: Shard) -> Packed | None:
        """A finished shard by its index alone."""
        try:
            index = cache.load(self.folder / (shard.name + SUFFIX))
            about = index.about
        except (FileNotFoundError, BadIndex):
            return None
        return Packed(shard.name, index.table.num_rows, about.shard_bytes, about.shard_digest)

    def _made_of(self) -> dict[str, Any]:
        """What dataset.json says beside the shards, as `data pack` writes it."""
        told = blake2b(json.dumps(dict(self.asked), sort_keys=True).encode(), digest_size=16).hexdigest()
        own = {"fingerprint": told, "samples_per_shard": self.samples_per_shard, "order": "source"}
        return {**own, "source": {"source": "generate", **self.asked}, "samples_of_source": self.total, "left_out": {}}

    def _record(self, drawn: Drawn) -> tuple[int, Record]:
        one = drawn.wanted
        about = described(self.about(one), drawn)
        about |= {"file_name": one.name} if one.name else {}
        prompt = one.prompt.text if one.prompt.text.strip() else ""
        return one.number, Record(str(one.number), {IMAGE: self.encoding(drawn.pixels_HWC)}, {"text": prompt}, about)


@dataclass
class _Arriving:
    """A source of records that come one after the other and are asked for in that order."""

    records: Iterator[tuple[int, Record]]
    index: None = None
    metric: str | None = field(default=None)

    def sample_id(self, number: int) -> int:
        """The picture's number in the list: the same whoever draws it."""
        return number

    def name(self, number: int) -> str:
        """For messages."""
        return f"picture {number}"

    def record(self, number: int) -> Record:
        """The next one."""
        found, record = next(self.records)
        assert found == number, f"picture {found} came in place of {number}"
        return record

    def report(self) -> SkipReport:
        """Nothing is left out."""
        return {}


def _bytes(file: BinaryIO, where: Mapping[str, Any]) -> bytes:
    file.seek(where["offset"])
    return file.read(where["size"])


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time writes dataset.json."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
