"""Whole files onto the local disk, checked: by their digest, the store's MD5, or two readings that agree.

A file comes in parts, several at once, each tried again by itself; a part that was hurt on its way is found by reading
it again, so that a large file gets through a bad line.
"""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import md5
from io import FileIO
from pathlib import Path
from typing import TypeVar

import xxhash

from daguerre.storage.clients import Store
from daguerre.storage.errors import Mismatch, NoRanges, Passing, StoreError
from daguerre.storage.location import WEB, Place
from daguerre.storage.retry import READINGS, Stat, ranged, size, tried

T = TypeVar("T")
PART_BYTES = 16 << 20
"""Length of one request."""
PARTS_AT_ONCE = 4
"""Requests beside each other for one file."""
_BLOCK_BYTES = 1 << 20
_UPLOAD_PARTS_MIB = (5, 8, 10, 15, 16, 20, 25, 32, 50, 64, 100, 128, 256, 512, 1024)
"""Usual sizes of the parts in which tools upload; the entity tag is then made of the parts' MD5s."""


def fetch_beside(place: Place, to: Path, digest: str | None, keep_other: bool) -> str:
    """`stores.fetch`."""
    beside = to.with_name(f".{to.name}.{secrets.token_hex(4)}.part")
    try:
        with beside.open("x+b", buffering=0) as file:
            found = fetch_into(place, file, size(place), digest, keep_other)
        os.replace(beside, to)
    finally:
        beside.unlink(missing_ok=True)
    return found


def fetch_into(place: Place, file: FileIO, stat: Stat, digest: str | None, keep_other: bool) -> str:
    """The same into an open empty file without a buffer."""
    file.truncate(stat.bytes)
    parts = [(start, min(PART_BYTES, stat.bytes - start)) for start in range(0, stat.bytes, PART_BYTES)]
    try:
        firsts = _side_by_side(lambda part: _pull(place, file, stat, part), parts)
        if not _as_promised(file, stat, digest):
            _side_by_side(lambda pair: _settle(place, file, stat, *pair), list(zip(parts, firsts, strict=True)))
    except NoRanges:
        _stream(place, file, stat, digest)
    found = digest_of(file)
    if found != digest and place.scheme in WEB and size(place) != stat:  # a store's ranges name the version they are of
        raise StoreError(place, "was replaced while it was read")
    if digest and found != digest and not keep_other:
        raise Mismatch(place, f"holds other bytes than expected: their digest is {found}, not {digest}")
    return found


def digest_of(file: FileIO) -> str:
    """xxh3_128 of a whole file, in hex."""
    digest = xxhash.xxh3_128()
    for block in _blocks(file, _BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def _blocks(file: FileIO, length: int) -> Iterator[bytes]:
    start = 0
    while block := os.pread(file.fileno(), length, start):
        yield block
        start += len(block)


def _side_by_side(work: Callable[[T], str], items: Sequence[T]) -> list[str]:
    """Results in order; the first error ends it all."""
    threads = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="fetch")
    try:
        return [done.result() for done in [threads.submit(work, item) for item in items]]
    finally:
        threads.shutdown(cancel_futures=True)


def _pull(place: Place, file: FileIO, stat: Stat, part: tuple[int, int]) -> str:
    """Writes one part as it comes; returns its digest."""
    data = ranged(place, *part, version=stat.version)
    _put(file, data, part[0])
    return xxhash.xxh3_128_hexdigest(data)


def _settle(place: Place, file: FileIO, stat: Stat, part: tuple[int, int], first: str) -> str:
    """Reads one part until two readings agree, and writes those bytes if they are not the first ones."""
    seen = Counter([first])
    for _ in range(READINGS):
        data = ranged(place, *part, version=stat.version)
        found = xxhash.xxh3_128_hexdigest(data)
        seen[found] += 1
        if seen[found] == 2:
            if found != first:
                _put(file, data, part[0])
            return found
    raise Passing(place, f"gives other bytes at each of {READINGS} readings: something on the way damages them")


def _put(file: FileIO, data: bytes, start: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file.fileno(), view, start)
        view, start = view[written:], start + written


def _stream(place: Place, file: FileIO, stat: Stat, digest: str | None) -> None:
    """From a server that gives no ranges: whole, from its beginning after every fault, until two readings agree."""

    def whole(store: Store, path: str) -> None:
        end = 0
        for block in store.get(path).stream():
            _put(file, block, end)
            end += len(block)
        file.truncate(end)

    seen: Counter[str] = Counter()
    for _ in range(READINGS):
        tried(place, whole)
        found = digest_of(file)
        seen[found] += 1
        if _as_promised(file, stat, digest) or seen[found] == 2:
            return
    raise Passing(place, f"gives other bytes at each of {READINGS} readings: something on the way damages them")


def _as_promised(file: FileIO, stat: Stat, digest: str | None) -> bool:
    """Whether the bytes are known to be right: by their digest if there is one, else by an entity tag that is made of
    MD5s (not all are)."""
    if digest:
        return digest_of(file) == digest
    found = re.fullmatch(r'"?([0-9a-f]{32})(?:-(\d{1,5}))?"?', stat.version)
    if not found:
        return False
    if not found[2]:
        return _md5(file) == found[1]
    count = int(found[2])
    sizes = [mib << 20 for mib in _UPLOAD_PARTS_MIB if -(-stat.bytes // (mib << 20)) == count]
    return any(_md5_of_parts(file, size) == found[1] for size in sizes)


def _md5(file: FileIO) -> str:
    whole = md5(usedforsecurity=False)
    for block in _blocks(file, _BLOCK_BYTES):
        whole.update(block)
    return whole.hexdigest()


def _md5_of_parts(file: FileIO, part_bytes: int) -> str:
    parts = (md5(part, usedforsecurity=False).digest() for part in _blocks(file, part_bytes))
    return md5(b"".join(parts), usedforsecurity=False).hexdigest()
