"""Damage in a data set: files are compared with their indexes, and images decoded. A unit is a job of a pool: a file of
samples (a shard, a table), or some samples of a source without such files.
"""

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from daguerre import keys
from daguerre.data import skipped
from daguerre.data.images import decode
from daguerre.data.images.headers import Undecodable
from daguerre.data.index import cache
from daguerre.data.index.cache import BadIndex
from daguerre.data.settings import SourceSettings
from daguerre.data.skipped import SkipReport
from daguerre.data.source import Source
from daguerre.storage import io as storage_io
from daguerre.storage.location import Location
from daguerre.types import IMAGE

OTHER_BYTES = "file that differs from its index"
MISSING = "file that does not exist"
OTHER_LISTED = "file that differs from dataset.json"
BAD_INDEX = "damaged index: `daguerre data index` makes it again"
OF_FILES = frozenset({OTHER_BYTES, MISSING, OTHER_LISTED, BAD_INDEX, cache.DAMAGED})
"""Reasons about a file, not about one of its samples."""
_TELL_SAMPLES = 16
_READ_BYTES = 1 << 25


@dataclass(frozen=True)
class Unit:
    """The samples of one job."""

    name: str
    numbers: np.ndarray
    """[n] int64: its samples."""
    decoded: np.ndarray
    """[m] int64: those that are decoded in any case."""
    location: Location | None = None
    """The file, if its bytes are checked as a whole."""
    index: Path | None = None
    """Its index."""
    indexed_before: bool = False
    """True if the index was there before, so that the file's bytes can be compared with it."""
    listed_digest: str | None = None
    """The digest in dataset.json."""


@dataclass(frozen=True)
class Found:
    """The result for a unit."""

    name: str
    samples: int
    decoded: int
    bytes: int | None = None
    """Size of the file."""
    compared: bool = False
    """True if the file's bytes could be compared with a digest."""
    faults: SkipReport | None = None


@dataclass(frozen=True)
class Verifier:
    """Verifies units of a source; a task of a job pool."""

    source: Source
    settings: SourceSettings

    def __call__(self, unit: Unit) -> Generator[int, None, Found]:
        """Yields counts of samples that are done."""
        faults: skipped.Counts = {}
        size_bytes = self._whole(unit, faults) if unit.location is not None else None
        counted = 0
        changed = {OTHER_BYTES, OTHER_LISTED} & faults.keys()  # then all samples are read, to find the damaged ones
        numbers = unit.numbers if changed else unit.decoded
        for done, number in enumerate(numbers.tolist() if MISSING not in faults else ()):
            if done - counted >= _TELL_SAMPLES:
                yield done - counted
                counted = done
            self._look(number, number in unit.decoded, faults)
        yield len(unit.numbers) - counted
        compared = unit.indexed_before or unit.listed_digest is not None
        return Found(unit.name, len(unit.numbers), len(unit.decoded), size_bytes, compared, faults)

    def _whole(self, unit: Unit, faults: skipped.Counts) -> int | None:
        """The size of the file; counts faults of the file as a whole."""
        assert unit.location is not None
        try:
            size_bytes, digest = file_digest(unit.location)
            own = cache.load(unit.index).about.shard_digest if unit.index is not None else None
            if unit.location.local is None and digest not in (own, unit.listed_digest):  # perhaps damaged in transit
                size_bytes, digest = file_digest(unit.location, twice=True)
        except FileNotFoundError:
            skipped.add(faults, MISSING, unit.name)
            return None
        if unit.index is not None:
            self._compare(unit, unit.index, size_bytes, digest, faults)
        if unit.listed_digest not in (None, digest):
            skipped.add(faults, OTHER_LISTED, unit.name)
        return size_bytes

    def _compare(self, unit: Unit, path: Path, size_bytes: int, digest: str, faults: skipped.Counts) -> None:
        """Compares the file with its index, and checks the index."""
        index = cache.load(path)
        try:
            index.whole()
        except BadIndex as error:
            skipped.add(faults, BAD_INDEX, str(error))
        found = cache.found_in(index.about)
        faults |= {reason: dict(found[reason]) for reason in found if reason == cache.DAMAGED}
        if (index.about.shard_bytes, index.about.shard_digest) != (size_bytes, digest):
            before = index.about.shard_bytes
            what = "" if before == size_bytes else f" ({before:,} bytes, now {size_bytes:,})"
            skipped.add(faults, OTHER_BYTES, f"{unit.name}{what}")

    def _look(self, number: int, whole: bool, faults: skipped.Counts) -> None:
        try:
            record = self.source.record(number)
            if whole:
                size = decode.sized(record.image, self.settings, None)[1]
                for name in record.images.keys() - {IMAGE}:
                    decode.beside(name, record.images[name], size, self.settings)
        except Undecodable as error:
            skipped.add(faults, str(error), self.source.name(number))


def chosen(ids: np.ndarray, share: float) -> np.ndarray:
    """[N] bool: a share of samples by a hash of their ids; at least one of them, unless the share is 0."""
    draws = keys.hashed_uniforms("verify", ids)
    picked = draws < share
    if share and len(ids) and not picked.any():
        picked[np.argmin(draws)] = True
    return picked


def file_digest(location: Location, twice: bool = False) -> tuple[int, str]:
    """Size and xxh3_128 of a file; with `twice` a remote one is read until two readings agree. OSError."""
    size_bytes = storage_io.size(location).bytes
    if location.local is not None:
        return size_bytes, cache.file_digest(location.local)
    digest = xxhash.xxh3_128()
    for start in range(0, size_bytes, _READ_BYTES):
        digest.update(storage_io.read(location, start, min(_READ_BYTES, size_bytes - start), twice=twice))
    return size_bytes, digest.hexdigest()
