"""Packs a data set into tar shards: the samples of each shard, and one shard written, or kept, as a job of a pool.

A finished shard is known by its recorded size and digest, which are checked before it is kept.
"""

import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from daguerre.data import skipped
from daguerre.data.images.headers import Undecodable
from daguerre.data.index import cache
from daguerre.data.index.cache import SUFFIX, BadIndex
from daguerre.data.skipped import SkipReport
from daguerre.data.source import Source
from daguerre.data.tar import index as tar_index
from daguerre.data.tar import writer
from daguerre.data.tar.samples import Unusable
from daguerre.storage import io as storage_io
from daguerre.storage.location import Location

_TELL_SAMPLES = 64
_LOOKED_AT = 256


@dataclass(frozen=True)
class Shard:
    """A shard to write."""

    name: str
    first: int
    """Index of its first sample among all that are packed: their keys count on from it."""
    numbers: np.ndarray
    """[n] int64: records of the source."""


@dataclass(frozen=True)
class Packed:
    """A finished shard."""

    name: str
    samples: int
    bytes: int
    digest: str
    """xxh3_128 of the file, hex."""
    left_out: SkipReport = field(default_factory=dict)
    version: str = ""
    """A store's version of this content."""


def shards(numbers: np.ndarray, samples_per_shard: int) -> list[Shard]:
    """Splits records into shards of `samples_per_shard`; the last one may be smaller."""
    starts = range(0, len(numbers), samples_per_shard)
    width = max(5, len(str(max(0, len(starts) - 1))))
    return [
        Shard(f"shard-{i:0{width}d}.tar", first, numbers[first : first + samples_per_shard])
        for i, first in enumerate(starts)
    ]


def fingerprint(ids: Sequence[int] | np.ndarray, how: str) -> str:
    """A digest of the samples in their order and of `how` they are packed: packing resumes only if it is the same."""
    digest = blake2b(how.encode(), digest_size=16)
    digest.update(np.asarray(ids, dtype="<i8").tobytes())
    return digest.hexdigest()


def mean_bytes(source: Source, numbers: np.ndarray, formats: tuple[str, ...]) -> float:
    """Mean size of a sample in a shard, of some that are read, evenly spread; 0 if none of them is usable."""
    sizes = []
    for number in numbers[np.unique(np.linspace(0, len(numbers) - 1, _LOOKED_AT).astype(np.int64))].tolist():
        with suppress(Undecodable, Unusable):
            files = writer.members(source.record(number), source.sample_id(number), formats)
            sizes.append(sum(512 + -(-len(content) // 512) * 512 for _, content in files))
    return sum(sizes) / max(1, len(sizes))


@dataclass(frozen=True)
class Packer:
    """Writes shards of a source; a task of a job pool."""

    source: Source
    formats: tuple[str, ...]
    to: str
    """A folder, or the address of a prefix of an object store, without a slash at its end."""
    recorded: tuple[Packed, ...] = ()
    """Shards that were finished before."""

    def __call__(self, shard: Shard) -> Generator[int, None, tuple[Packed, bool]]:
        """Returns the shard, and True if it was there already; yields counts of records."""
        before = next((packed for packed in self.recorded if packed.name == shard.name), None)
        if before is not None and self._is_there(before):
            yield len(shard.numbers)
            return before, True
        if "://" not in self.to:
            return (yield from self._written(shard, Path(self.to))), False
        with tempfile.TemporaryDirectory(prefix="daguerre-pack-") as folder:
            packed = yield from self._written(shard, Path(folder))
            return self._sent(packed, Path(folder)), False

    def _is_there(self, packed: Packed) -> bool:
        location = Location(f"{self.to}/{packed.name}")
        if location.local is None:
            try:
                found = storage_io.size(location)
            except FileNotFoundError:
                return False
            return (found.bytes, found.version) == (packed.bytes, packed.version)
        try:
            about = cache.load(location.local.with_name(packed.name + SUFFIX)).about
            return cache.file_digest(location.local) == about.shard_digest == packed.digest
        except (FileNotFoundError, BadIndex):
            return False

    def _written(self, shard: Shard, folder: Path) -> Generator[int, None, Packed]:
        """Writes the shard and its index into a folder. The index is made from the file itself, so that faults of
        writing show here."""
        left_out: skipped.Counts = {}
        path = folder / shard.name
        done = 0
        with writer.replacing(path) as file:
            for _ in writer.write_tar(file, self._samples(shard, left_out)):
                done += 1
                if done % _TELL_SAMPLES == 0:
                    yield _TELL_SAMPLES
        name = Location(f"{self.to}/{shard.name}").name
        index = tar_index.build(path, name, self.formats, storage_io.size(Location(str(path))).version)
        cache.save(index, path.with_name(path.name + SUFFIX))
        yield len(shard.numbers) - done // _TELL_SAMPLES * _TELL_SAMPLES
        about, samples = index.about, index.table.num_rows
        assert not about.damage, f"{path} is damaged although it was just written: {about.damage}"
        assert samples == done - sum(entry["count"] for entry in about.left_out.values()), f"{path}: {samples}"
        left_out = skipped.merged(left_out, about.left_out)
        return Packed(shard.name, samples, about.shard_bytes, about.shard_digest, left_out)

    def _samples(self, shard: Shard, left_out: skipped.Counts) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
        """(key, files) of each record that can be used; the others are counted."""
        location = shard.first
        for number in shard.numbers.tolist():
            try:
                files = writer.members(self.source.record(number), self.source.sample_id(number), self.formats)
            except (Undecodable, Unusable) as error:
                skipped.add(left_out, str(error), self.source.name(number))
                continue
            finally:
                location += 1
            yield f"{location - 1:09d}", files

    def _sent(self, packed: Packed, folder: Path) -> Packed:
        """The shard in the store, then its index: an index says that its shard is whole."""
        address = f"{self.to}/{packed.name}"
        storage_io.write(address, (folder / packed.name).read_bytes())
        version = storage_io.size(Location(address)).version
        index = cache.load(folder / (packed.name + SUFFIX))
        index = replace(index, about=replace(index.about, version=version))
        storage_io.write(address + SUFFIX, cache.encoded(index))
        return replace(packed, version=version)
