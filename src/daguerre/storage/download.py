"""Downloads of whole files, checked by their digest, the store's MD5, or two readings that agree.

A file comes in parts, several at once, each retried by itself; a part that was damaged in transit is found by reading
it again, so that a large file gets through a bad line.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import md5
from io import FileIO
from typing import Any, TypeVar

import xxhash

from daguerre.storage.clients import Store
from daguerre.storage.errors import Mismatch, NoRanges, StoreError
from daguerre.storage.location import WEB, Location
from daguerre.storage.retry import READINGS, Stat, never_alike, ranged, size, with_retries

T = TypeVar("T")
PART_BYTES = 16 << 20
"""Length of one request."""
PARTS_AT_ONCE = 4
"""Concurrent requests for one file."""
_BLOCK_BYTES = 1 << 20
_UPLOAD_PARTS_MIB = (5, 8, 10, 15, 16, 20, 25, 32, 50, 64, 100, 128, 256, 512, 1024)
"""Sizes of parts in which tools upload; the entity tag is then made of the parts' MD5s."""


def fetch_into(location: Location, file: FileIO, stat: Stat, digest: str | None, keep_other: bool) -> str:
    """Downloads into an open empty file without a buffer; see `io.fetch`."""
    file.truncate(stat.bytes)
    parts = [(start, min(PART_BYTES, stat.bytes - start)) for start in range(0, stat.bytes, PART_BYTES)]
    try:
        firsts = _in_threads(lambda part: _put(file, ranged(location, *part, version=stat.version), part[0]), parts)
        if not _is_right(file, stat, digest):
            _in_threads(lambda pair: _settle(location, file, stat, *pair), list(zip(parts, firsts, strict=True)))
    except NoRanges:
        _stream(location, file, stat, digest)
    found = digest_of(file)
    if (
        found != digest and location.scheme in WEB and size(location) != stat
    ):  # a store's ranges name the version they are of
        raise StoreError(location, "was replaced while it was being read")
    if digest and found != digest and not keep_other:
        raise Mismatch(location, f"has other bytes than expected: the digest is {found}, not {digest}")
    return found


def digest_of(file: FileIO) -> str:
    """xxh3_128 of a whole file, in hex."""
    return _hexdigest(xxhash.xxh3_128(), file)


def _hexdigest(digest: Any, file: FileIO) -> str:
    for block in _blocks(file, _BLOCK_BYTES):
        digest.update(block)
    return str(digest.hexdigest())


def _blocks(file: FileIO, length: int) -> Iterator[bytes]:
    start = 0
    while block := os.pread(file.fileno(), length, start):
        yield block
        start += len(block)


def _in_threads(work: Callable[[T], str], items: Sequence[T]) -> list[str]:
    """Results in order; the first error cancels the rest."""
    threads = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="fetch")
    try:
        return [done.result() for done in [threads.submit(work, item) for item in items]]
    finally:
        threads.shutdown(cancel_futures=True)


def _settle(location: Location, file: FileIO, stat: Stat, part: tuple[int, int], first: str) -> str:
    """Reads one part until two readings agree, and writes those bytes if they are not the first ones."""
    seen = Counter([first])
    for _ in range(READINGS):
        data = ranged(location, *part, version=stat.version)
        found = xxhash.xxh3_128_hexdigest(data)
        seen[found] += 1
        if seen[found] == 2:
            if found != first:
                _put(file, data, part[0])
            return found
    raise never_alike(location)


def _put(file: FileIO, data: Any, start: int) -> str:
    """Writes one part; returns its digest."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file.fileno(), view, start)
        view, start = view[written:], start + written
    return xxhash.xxh3_128_hexdigest(data)


def _stream(location: Location, file: FileIO, stat: Stat, digest: str | None) -> None:
    """Downloads from a server without ranges: from the beginning after every fault, until two readings agree."""

    def whole(store: Store, path: str) -> None:
        end = 0
        for block in store.get(path).stream():
            _put(file, block, end)
            end += len(block)
        file.truncate(end)

    seen: Counter[str] = Counter()
    for _ in range(READINGS):
        with_retries(location, whole)
        found = digest_of(file)
        seen[found] += 1
        if _is_right(file, stat, digest) or seen[found] == 2:
            return
    raise never_alike(location)


def _is_right(file: FileIO, stat: Stat, digest: str | None) -> bool:
    """True if the digest matches; without one, if an entity tag that is made of MD5s (not all are) does."""
    if digest:
        return digest_of(file) == digest
    found = re.fullmatch(r'"?([0-9a-f]{32})(?:-(\d{1,5}))?"?', stat.version)
    if not found:
        return False
    if not found[2]:
        return _hexdigest(md5(usedforsecurity=False), file) == found[1]
    count = int(found[2])
    sizes = [mib << 20 for mib in _UPLOAD_PARTS_MIB if -(-stat.bytes // (mib << 20)) == count]
    return any(_md5_of_parts(file, size) == found[1] for size in sizes)


def _md5_of_parts(file: FileIO, part_bytes: int) -> str:
    parts = (md5(part, usedforsecurity=False).digest() for part in _blocks(file, part_bytes))
    return md5(b"".join(parts), usedforsecurity=False).hexdigest()
