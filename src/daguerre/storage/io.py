"""Network access of the data engine and of runs: sizes, ranges, whole files, listings, writing; the same for local
files.

Every request is bounded and retried after a pause; bytes are checked (a digest, the store's MD5, or two readings that
agree). A file that fails to the end is a `StoreError` without credentials in it.
"""

import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import md5, sha256
from itertools import chain
from pathlib import Path
from typing import Any, cast

import xxhash
from obstore.store import GCSStore, S3Store

from daguerre.errors import UserError
from daguerre.fresh import hidden, naming
from daguerre.storage.clients import Store
from daguerre.storage.download import fetch_into
from daguerre.storage.errors import BadName, Mismatch, Missing, NoRanges, StoreError, Transient
from daguerre.storage.location import STORES, WEB, Location
from daguerre.storage.retry import READINGS, Stat, never_alike, ranged, size, with_retries

__all__ = ["Mismatch", "Missing", "NoRanges", "Stat", "StoreError", "Transient", "size"]

ALIKE = 3
"""Equal readings that are refused, after which bytes count as stored that way."""
_PAGE_KEYS = 5000
_PUT_BYTES = 64 << 20
_MOST_PARTS = 9000
_PARTS_AT_ONCE = 8


@dataclass(frozen=True)
class Sent:
    """A large object that arrived whole."""

    size_bytes: int
    sha256: str
    tag: str
    """The store's entity tag."""


def exists(location: Location) -> bool:
    """True if there is a file. StoreError if that cannot be found out."""
    if location.local is not None:
        return location.local.is_file()
    try:
        size(location)
    except Missing:
        return False
    return True


def read(
    location: Location, start: int, length: int, check: Callable[[bytes], bool] | None = None, *, twice: bool = False
) -> bytes:
    """Exactly `length` bytes from `start` on; what `check` refuses is read again, as it may be damaged in transit.

    Without a check the bytes are taken as they come, or with `twice` once two readings agree. `Mismatch` (with the
    bytes) if they are equal at every reading and the check still refuses them, or if the file ends before; other
    StoreErrors for faults that outlast the retries, OSError for those of the local disk.
    """
    if not length:
        return b""
    seen: Counter[str] = Counter()
    for _ in range(READINGS):
        data = ranged(location, start, length)
        if check(data) if check else not twice:
            return data
        alike = xxhash.xxh3_128_hexdigest(data)
        seen[alike] += 1
        if check is None and seen[alike] == 2:
            return data
        if seen[alike] == ALIKE:
            raise Mismatch(location, f"has other bytes than expected from {start:,} to {start + length:,}", data=data)
    raise never_alike(location)


def fetch(location: Location, to: Path, digest: str | None = None, *, keep_other: bool = False) -> str:
    """Downloads a whole file to `to`, atomically, and returns its xxh3_128 in hex.

    The bytes are checked by `digest`, else by the store's MD5, else by a second reading. `Mismatch` if two readings
    agree on other bytes than those of `digest`; `keep_other` keeps them.
    """
    with _replacing(to) as beside, beside.open("x+b", buffering=0) as file:
        return fetch_into(location, file, size(location), digest, keep_other)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file that replaces `path` at the end of the block."""
    beside = hidden(path, f".{secrets.token_hex(4)}.part")
    try:
        with naming(path):
            yield beside
            os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def listing(url: str) -> list[Location]:
    """All files under a prefix of an object store that ends in `/`, sorted. It is read until two readings agree; a
    name that cannot be is damage like any other unless each reading has one."""
    location = Location(url)
    assert location.scheme in STORES, location.name
    seen: Counter[tuple[str, ...]] = Counter()
    bad: list[BadName] = []
    for _ in range(READINGS):
        try:
            found = tuple(sorted(meta["path"] for meta in entries(location)))
        except BadName as error:
            bad.append(error)
            continue
        seen[found] += 1
        if seen[found] == 2:
            return [Location(f"{location.scheme}://{location.bucket}/{key}") for key in found]
    if len(bad) == READINGS:
        raise bad[0]
    raise Transient(
        location, f"is listed differently in each of {READINGS} readings: is another process writing to it?"
    )


def entries(location: Location) -> list[Any]:
    """obstore's ObjectMeta of all objects under a prefix, read once; a fault in a long listing costs one page."""
    found: list[Any] = []

    def following(store: Store, path: str) -> list[Any]:
        after = found[-1]["path"] if found else None
        return list(next(iter(store.list(path or None, offset=after, chunk_size=_PAGE_KEYS)), []))

    while True:
        page = with_retries(location, following)
        found += page
        if len(page) < _PAGE_KEYS:
            return found


def level(location: Location) -> tuple[list[Any], list[str]]:
    """obstore's ObjectMeta of the objects right below a prefix, and the names of the folders there, read once."""
    found = with_retries(location, lambda store, path: store.list_with_delimiter(path or None))
    return list(found["objects"]), [str(one) for one in found["common_prefixes"]]


def write(to: str | Path | Location, data: bytes) -> None:
    """Creates or replaces a file: locally and atomically, or in a store, where it arrives whole. StoreError."""
    location = to if isinstance(to, Location) else Location(str(to))
    if location.scheme in WEB:
        what = f"{location.name}: a web server cannot be written to; give a folder, s3:// or gs://"
        raise UserError(what, code="unsupported")
    if location.local is not None:
        location.local.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(location.local) as beside:
            beside.write_bytes(data)
        return
    try:
        send(location, lambda: [data], _PUT_BYTES)
    except StoreError as error:
        error.setting = ""
        raise


def send(location: Location, chunks: Callable[[], Iterable[Any]], part_bytes: int, about_bytes: int = 0) -> Sent:
    """Creates or replaces an object of a store from pieces of memory, which `chunks` makes again for each try.

    It has arrived by the store's MD5, else because it is read back. StoreError.
    """
    part_bytes = max(part_bytes, -(-about_bytes // _MOST_PARTS))

    def put(store: Store, path: str) -> tuple[str, _Sums]:
        sums = _Sums()
        parts = (sums.add(part) for part in _parts(chunks(), part_bytes))
        first, second = next(parts, None), next(parts, None)
        writable = cast("S3Store | GCSStore", store)
        if second is None:
            done = writable.put(path, sums.add(b"") if first is None else first, use_multipart=False)
        else:
            every = chain([first or b"", second], parts)
            done = writable.put(path, every, use_multipart=True, chunk_size=part_bytes, max_concurrency=_PARTS_AT_ONCE)
        return done["e_tag"] or "", sums

    for _ in range(READINGS):
        tag, sums = with_retries(location, put, "written")
        if tag.strip('"') in sums.tags() or stored_sha256(location, sums.size_bytes) == sums.sha256:
            return Sent(sums.size_bytes, sums.sha256, tag)
    raise Transient(location, "has other bytes than were written to it", "")


def stored_sha256(location: Location, size_bytes: int, part_bytes: int = 8 << 20) -> str:
    """SHA-256 of an object as the store gives it; empty if it is not of that size or does not exist."""
    digest = sha256()
    try:
        if size(location).bytes != size_bytes:
            return ""
        for start in range(0, size_bytes, part_bytes):
            digest.update(read(location, start, min(part_bytes, size_bytes - start)))
    except (Missing, Mismatch):
        return ""
    return digest.hexdigest()


def _parts(chunks: Iterable[Any], part_bytes: int) -> Iterator[bytes]:
    """The same bytes in parts of one length."""
    waiting = bytearray()
    for chunk in chunks:
        view = memoryview(chunk)
        view = view.cast("B") if view.nbytes else view[:0]  # what is empty cannot be cast
        while view:
            room = part_bytes - len(waiting)
            waiting += view[:room]
            view = view[room:]
            if len(waiting) == part_bytes:
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        yield bytes(waiting)


class _Sums:
    """Digests of what is sent: of the whole, and the MD5s of which stores make entity tags."""

    def __init__(self) -> None:
        self.size_bytes, self._whole, self._md5s = 0, sha256(), list[bytes]()

    def add(self, part: bytes) -> bytes:
        self._whole.update(part)
        self._md5s.append(md5(part, usedforsecurity=False).digest())
        self.size_bytes += len(part)
        return part

    @property
    def sha256(self) -> str:
        return self._whole.hexdigest()

    def tags(self) -> set[str]:
        together = md5(b"".join(self._md5s), usedforsecurity=False).hexdigest()
        one = {self._md5s[0].hex()} if len(self._md5s) == 1 else set()
        return {f"{together}-{len(self._md5s)}", *one}
