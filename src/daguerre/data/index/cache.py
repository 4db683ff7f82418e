"""The indexes of a data set's shards: found, and made where they are missing.

An index file lies next to its shard (`SHARD.index`), else in the cache folder. What is in the file is
`data/index/file.py`, all of them as one `data/index/join.py`.
"""

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa

from daguerre import system
from daguerre.data import skipped
from daguerre.data.index.file import (
    About,
    BadIndex,
    ShardIndex,
    decoded,
    encoded,
    file_digest,
    head,
    load,
    sample_ids,
    save,
)
from daguerre.data.index.join import combined
from daguerre.data.loading import job_pool
from daguerre.data.skipped import SkipReport
from daguerre.errors import UserError
from daguerre.storage import io as storage_io
from daguerre.storage.errors import StoreError
from daguerre.storage.location import Location

__all__ = ["combined", "encoded", "file_digest", "load"]
"""Of other modules of this package, for those who import this one only."""

SUFFIX = ".index"
DAMAGED = "damaged shard: how many samples were in these bytes is not known"
CHANGED = (
    "shard that changed since it was indexed, so each sample is checked; `daguerre data index again=true` updates "
    "the index"
)
_PROGRESS_SECONDS = 10.0
_LITTLE_BYTES = 64_000_000


def home(location: Location, kind: str, cache_dir: Path) -> Path:
    """The path at which the index of a shard is kept if it is not next to it."""
    named = f"{kind} {location.identity}".encode("utf-8", "surrogatepass")  # names of files need not be UTF-8
    return cache_dir / "indexes" / f"{blake2b(named, digest_size=16).hexdigest()}{SUFFIX}"


def indexes(
    locations: Sequence[Location],
    kind: str,
    build: Callable[[Location], ShardIndex],
    cache_dir: Path,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> list[Path]:
    """The index files of shards, in their order; builds those that are missing, in processes.

    `build` travels to them: a function of a module, or a small frozen dataclass with `__call__`. An index is taken as
    it is found even where the shard has changed since: what is read is checked against it.
    """
    kept = [_kept(location, kind, cache_dir) for location in locations]
    if None in kept:
        with alone(cache_dir, say):
            kept = [path or _kept(location, kind, cache_dir) for location, path in zip(locations, kept, strict=True)]
            missing = [location for location, path in zip(locations, kept, strict=True) if path is None]
            try:
                _build(missing, _Building(kind, build, cache_dir), say)
            except StoreError as error:
                raise UserError(str(error), code="unreachable", setting=error.setting or None) from error
    return [path or home(location, kind, cache_dir) for location, path in zip(locations, kept, strict=True)]


def found(location: Location, kind: str, cache_dir: Path) -> Path | None:
    """The index of a shard: next to it (that of a far one is fetched) or in the cache; None where none can be used."""
    return _kept(location, kind, cache_dir) or _fetched(location, kind, cache_dir)


def _kept(location: Location, kind: str, cache_dir: Path) -> Path | None:
    for path in _places(location, kind, cache_dir):
        with suppress(FileNotFoundError, NotADirectoryError, BadIndex):
            if head(path).about.kind == kind:
                return path
    return None


def _places(location: Location, kind: str, cache_dir: Path) -> Iterator[Path]:
    if (local := location.local) is not None:
        yield local.with_name(local.name + SUFFIX)
    yield home(location, kind, cache_dir)


def _fetched(location: Location, kind: str, cache_dir: Path) -> Path | None:
    """The index next to a far shard, copied into the cache. None where its name may not be asked for."""
    if location.local is not None or "?" in location.url:  # a signature is for one name
        return None
    beside, path = Location(location.url + SUFFIX), home(location, kind, cache_dir)
    try:
        data = storage_io.read(beside, 0, storage_io.size(beside).bytes, twice=True)
        index = decoded(pa.py_buffer(data), path)
        index.whole()
    except (StoreError, BadIndex) as error:
        if isinstance(error, StoreError) and error.passing:
            raise
        return None
    if index.about.kind != kind:
        return None
    noted = _noted(location, index.about, storage_io.size(location).bytes)
    about = replace(index.about, left_out=skipped.merged(index.about.left_out, noted))
    save(replace(index, about=about), path)
    return path


@dataclass(frozen=True)
class _Building:
    """Fetches or builds the index of one shard, and keeps it; wherever this is done."""

    kind: str
    build: Callable[[Location], ShardIndex]
    cache_dir: Path

    def __call__(self, location: Location) -> Generator[int, None, int]:
        path = _fetched(location, self.kind, self.cache_dir)
        if path is None:
            index = self.build(location)
            assert index.about.kind == self.kind, index.about.kind
            path = home(location, self.kind, self.cache_dir)
            save(index, path)
        count = head(path).count
        yield count
        return count


def _build(locations: Sequence[Location], building: _Building, say: Callable[[str], None]) -> None:
    """Says how far it is every few seconds, so that a long build is no silence."""
    started = spoken = time.monotonic()
    shards, samples = 0, 0
    for step in job_pool.run_jobs(building, locations, processes(locations)):
        if isinstance(step, int):
            samples += step
            continue
        shards += 1
        if (now := time.monotonic()) - spoken > _PROGRESS_SECONDS:
            left_s = (now - started) / shards * (len(locations) - shards)
            done = f"{shards:,} of {len(locations):,} shards have their index here"  # made, or fetched
            say(f"{done}, {samples:,} samples; about {left_s:,.0f} s left")
            spoken = now


def processes(locations: Sequence[Location]) -> int:
    """Processes that read these shards: one for what is read sooner than others start."""
    far = any(location.local is None for location in locations)
    little = sum(location.local.stat().st_size for location in locations if location.local) < _LITTLE_BYTES
    return 1 if little and not far else job_pool.usual_processes()


def cannot_write(folder: Path, error: OSError) -> UserError:
    """For a cache folder in which no index can be kept."""
    return UserError(
        f"data.cache_dir: indexes are kept in {str(folder)!r}, which is not writable ({error.strerror}). Choose a "
        "writable folder with data.cache_dir=DIR",
        code="unsupported",
        setting="data.cache_dir",
    )


@contextmanager
def alone(cache_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One process at a time builds into a folder: the ranks of a node want the same indexes at the same moment."""
    folder = cache_dir / "indexes"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise cannot_write(folder, error) from error
    with lock:
        try:
            if not system.try_lock(lock.fileno()):
                say(f"waiting for another process that is indexing, or choosing samples, in {folder}")
                system.lock(lock.fileno())
        except OSError as error:  # a file system without locks: the same work is done several times, and is not wrong
            say(f"{folder} does not support locks ({error.strerror}): other processes may do the same work again")
        yield


def left_out(paths: Sequence[Path]) -> SkipReport:
    """Samples left out when the shards were indexed, and byte ranges in which nobody knows what was."""
    return skipped.merged(*(found_in(head(path).about) for path in paths))


def found_in(about: About) -> SkipReport:
    """The same of one shard."""
    damage: skipped.Counts = {}
    for start, stop in about.damage:
        where = f"bytes {start:,} to {stop:,}" if stop > start else f"cut off at byte {start:,}"
        skipped.add(damage, DAMAGED, f"{about.shard}: {where}")
    return skipped.merged(about.left_out, damage)


def changed(locations: Sequence[Location], paths: Sequence[Path]) -> SkipReport:
    """Local shards whose size is no longer that of their index; what is read of them is checked sample by sample."""
    local = [(location, path) for location, path in zip(locations, paths, strict=True) if location.local]
    return skipped.merged(
        *(_noted(location, head(path).about, storage_io.size(location).bytes) for location, path in local)
    )


def stamps(locations: Sequence[Location], paths: Sequence[Path]) -> np.ndarray:
    """[N] uint64: of each sample, by its digest when it was indexed, and size and version of its shard now."""
    found: list[np.ndarray] = [np.empty(0, np.uint64)]
    for location, path in zip(locations, paths, strict=True):
        stat = storage_io.size(location)
        own = blake2b(f"{stat.bytes} {stat.version}".encode(), digest_size=8).digest()
        found.append(load(path).numpy("digest") ^ np.frombuffer(own, np.uint64))
    return np.concatenate(found)


def digests_of_given_ids(paths: Sequence[Path], place: str) -> np.ndarray | None:
    """[N] uint64: digests of all samples, images and texts, where ids are given to them; None where ids follow from the
    contents of a shard and the `place` in it, so that no text changes without them."""
    shards = [load(path) for path in paths]
    for index in shards:
        if len(own := index.numpy("id")[:1]):
            if own[0] == sample_ids(index.about.shard_digest, index.numpy(place)[:1])[0]:
                return None
            break
    return np.concatenate([np.empty(0, np.uint64), *(index.numpy("digest") for index in shards)])


def _noted(location: Location, about: About, now_bytes: int) -> SkipReport:
    if now_bytes == about.shard_bytes:
        return {}
    counts: skipped.Counts = {}
    skipped.add(counts, CHANGED, f"{location.name} ({about.shard_bytes:,} bytes, now {now_bytes:,})", kept=True)
    return counts
