"""All network access of the data engine: sizes, ranges, whole files, listings, writing. Local files go the same way.

Every request is bounded and tried again after a pause; what comes is checked (a digest, the store's MD5, or two
readings that agree). A place that fails to the end is a `StoreError` without credentials in it. Whole far
files that are kept on the local disk: storage/file_cache.py.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import md5
from pathlib import Path

import xxhash

from daguerre.errors import UserError
from daguerre.storage import local_files
from daguerre.storage.clients import Store
from daguerre.storage.download import fetch_beside
from daguerre.storage.errors import Mismatch, Missing, NoRanges, Passing, StoreError
from daguerre.storage.location import STORES, WEB, Place
from daguerre.storage.retry import READINGS, Stat, ranged, size, tried

__all__ = [
    "Mismatch",
    "Missing",
    "NoRanges",
    "Opening",
    "Passing",
    "Stat",
    "StoreError",
    "exists",
    "fetch",
    "listing",
    "opening",
    "read",
    "size",
    "write",
]

ALIKE = 3
"""Readings that are alike and yet refused, after which bytes count as stored that way."""
_PAGE_KEYS = 5000
_PUT_BYTES = 64 << 20


@dataclass(frozen=True)
class Opening:
    """How a file begins, for saying what it is instead of what was expected."""

    data: bytes
    """Its first bytes."""
    content_type: str
    """As the server calls it, such as `text/html`; empty if unknown."""


def exists(place: Place) -> bool:
    """Whether there is a file; StoreError where that cannot be found out."""
    if place.local is not None:
        return place.local.is_file()
    try:
        size(place)
    except Missing:
        return False
    return True


def opening(place: Place, length: int = 512) -> Opening:
    """The first bytes (fewer if there are not as many) and the content type."""
    if place.local is not None:
        return Opening(local_files.read(place.local, 0, length), "")

    def first(store: Store, path: str) -> Opening:
        got = store.get(path)
        data = bytes(next(iter(got.stream(min_chunk_size=length)), b""))
        return Opening(data[:length], str(got.attributes.get("Content-Type", "")))

    return tried(place, first)


def read(
    place: Place, start: int, length: int, check: Callable[[bytes], bool] | None = None, *, twice: bool = False
) -> bytes:
    """Exactly `length` bytes from `start` on; what `check` refuses is read again, as it may have been hurt on its way.

    Without a check the bytes are taken as they come, or with `twice` once two readings agree. `Mismatch` (with the
    bytes) where they come alike again and again and the check still refuses them, or where the file ends before;
    other StoreErrors for faults that outlast the retries, OSError for those of the local disk.
    """
    if not length:
        return b""
    seen: Counter[str] = Counter()
    for _ in range(READINGS):
        data = ranged(place, start, length)
        if check(data) if check else not twice:
            return data
        alike = xxhash.xxh3_128_hexdigest(data)
        seen[alike] += 1
        if check is None and seen[alike] == 2:
            return data
        if seen[alike] == ALIKE:
            raise Mismatch(place, f"holds other bytes than expected from {start:,} to {start + length:,}", data=data)
    raise Passing(place, f"gives other bytes at each of {READINGS} readings: something on the way damages them")


def fetch(place: Place, to: Path, digest: str | None = None, *, keep_other: bool = False) -> str:
    """Brings a whole file to `to`, never half of it, and returns its xxh3_128 in hex.

    What comes is right by `digest`, else by the store's MD5, else because two readings agree. `Mismatch` where two
    readings agree on other bytes than those of `digest`; `keep_other` keeps them.
    """
    return fetch_beside(place, to, digest, keep_other)


def listing(url: str) -> list[Place]:
    """All files under a prefix of an object store that ends in `/`, sorted. It is read until two readings agree."""
    place = Place(url)
    assert place.scheme in STORES, place.name
    seen: Counter[tuple[str, ...]] = Counter()
    for _ in range(READINGS):
        found = _listed(place)
        seen[found] += 1
        if seen[found] == 2:
            return [Place(f"{place.scheme}://{place.bucket}/{key}") for key in found]
    raise Passing(place, f"is listed differently at each of {READINGS} readings: is it being written to?")


def _listed(place: Place) -> tuple[str, ...]:
    """Goes on after the last key that came, so that a fault in a long listing costs one page."""
    keys: list[str] = []
    while True:
        page = tried(place, lambda store, path: _page(store, path, keys[-1] if keys else None))
        keys.extend(page)
        if len(page) < _PAGE_KEYS:
            return tuple(sorted(keys))


def _page(store: Store, prefix: str, after: str | None) -> list[str]:
    stream = store.list(prefix or None, offset=after, chunk_size=_PAGE_KEYS)
    return [meta["path"] for meta in next(iter(stream), [])]


def write(to: str | Path | Place, data: bytes) -> None:
    """Creates or replaces a file, here (at once) or in a store (and sees that it arrived whole). StoreError."""
    place = to if isinstance(to, Place) else Place(str(to))
    if place.scheme in WEB:
        raise UserError(f"{place.name}: nothing can be written to a web server; give a folder, s3:// or gs://")
    if place.local is not None:
        return _write_here(place.local, data)
    try:
        return _write_far(place, data)
    except StoreError as error:
        error.setting = ""
        raise


def _write_far(place: Place, data: bytes) -> None:
    for _ in range(READINGS):
        put = tried(place, lambda store, path: store.put(path, data, chunk_size=_PUT_BYTES), "written")
        if (put["e_tag"] or "").strip('"') in _tags(data) or read(place, 0, len(data), twice=True) == data:
            return
    raise Passing(place, "holds other bytes than were written to it")


def _tags(data: bytes) -> set[str]:
    """Entity tags that tell that these bytes arrived: their MD5, or that of the MD5s of the parts they were sent in."""
    parts = [md5(data[start : start + _PUT_BYTES], usedforsecurity=False) for start in range(0, len(data), _PUT_BYTES)]
    together = md5(b"".join(part.digest() for part in parts), usedforsecurity=False).hexdigest()
    return {md5(data, usedforsecurity=False).hexdigest(), f"{together}-{len(parts)}"}


def _write_here(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        beside.write_bytes(data)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
