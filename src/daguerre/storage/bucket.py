"""A place in an object store under which a run's objects lie: read, written, created once, replaced, listed, deleted.

Every write is known to have arrived: by the MD5 that the store answers, else because it is read back. Two writers of
one object are told apart by the store (`create`, `replace`), never by looking first. What the objects mean is not known
here. StoreError for what a store refuses to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import md5, sha256
from itertools import chain
from pathlib import Path
from typing import Any, cast

from obstore.exceptions import AlreadyExistsError, NotFoundError, PreconditionError
from obstore.store import GCSStore, S3Store

from daguerre.storage import address
from daguerre.storage import io as storage_io
from daguerre.storage.clients import Store
from daguerre.storage.errors import Missing, Passing
from daguerre.storage.location import Place
from daguerre.storage.retry import READINGS, tried

PART_BYTES = 8 << 20
"""Length of what is sent at once of a large object."""
_MOST_PARTS = 9000
_PARTS_AT_ONCE = 8
_PAGE = 5000

Version = dict[str, str]
"""What tells one content of an object from another, for `replace`."""


@dataclass(frozen=True)
class Listed:
    """An object in a listing."""

    name: str
    """Below the prefix."""
    bytes: int
    tag: str
    """The store's entity tag."""
    changed: datetime
    """By the store's clock."""


@dataclass(frozen=True)
class Sent:
    """A large object that arrived whole."""

    size_bytes: int
    sha256: str
    tag: str
    """The store's entity tag."""


@dataclass(frozen=True)
class Prefix:
    """`s3://bucket/folder` or `gs://bucket/folder`, without a slash at its end."""

    url: str

    def __truediv__(self, name: str) -> Prefix:
        return Prefix(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """What people are shown."""
        return Place(self.url).name

    @property
    def last(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]

    def place(self, name: str) -> Place:
        """Of an object below."""
        return Place(f"{self.url}/{name}")

    def read(self, name: str) -> tuple[bytes, Version]:
        """An object and its version. StoreError; `Missing` where there is none."""

        def got(store: Store, path: str) -> tuple[bytes, Version, str]:
            answer = store.get(path)
            tag = answer.meta["e_tag"] or ""
            return bytes(answer.bytes()), _version(answer.meta), tag

        place = self.place(name)
        seen: list[bytes] = []
        for _ in range(READINGS):
            data, version, tag = tried(place, got)
            if tag.strip('"') == _md5(data) or data in seen:
                return data, version
            seen.append(data)
        raise Passing(place, "comes differently at each reading: something on the way damages it", "")

    def write(self, name: str, data: bytes) -> None:
        """Creates or replaces an object."""
        storage_io.write(self.place(name), data)

    def create(self, name: str, data: bytes) -> Version | None:
        """Creates an object; None where there is one already, whoever came first."""
        return self._conditionally(name, data, "create")

    def replace(self, name: str, data: bytes, version: Version) -> Version | None:
        """Replaces an object of that version; None where it is another one by now, or gone."""
        return self._conditionally(name, data, version)

    def _conditionally(self, name: str, data: bytes, mode: Any) -> Version | None:
        """`data` has to be unlike anything written before: so it is known who wrote it where an answer was lost."""
        place = self.place(name)
        for _ in range(READINGS):

            def put(store: Store, path: str, mode: Any = mode) -> Version | None:
                try:
                    return _version(_real(store).put(path, data, mode=mode, use_multipart=False))
                except (AlreadyExistsError, PreconditionError):
                    return None
                except NotFoundError:
                    if mode == "create":  # then it is the bucket that is not there
                        raise
                    return None

            version = tried(place, put, "written")
            try:
                there, current = self.read(name)
            except Missing:
                return None
            if there == data:
                return current
            if version is None or current.get("e_tag") != version.get("e_tag"):  # somebody else's
                return None
            mode = version  # ours, hurt on its way
        raise Passing(place, "holds other bytes than were written to it", "")

    def send(self, name: str, chunks: Callable[[], Iterable[Any]], about_bytes: int = 0) -> Sent:
        """Creates or replaces an object of any size from pieces of memory, which `chunks` gives anew at each try."""
        place, part_bytes = self.place(name), max(PART_BYTES, -(-about_bytes // _MOST_PARTS))
        for _ in range(READINGS):
            sums = _Sums()

            def put(store: Store, path: str, sums: _Sums = sums) -> str:
                sums.begin()
                parts = (sums.add(part) for part in _parts(chunks(), part_bytes))
                first, second = next(parts, None), next(parts, None)
                if second is None:
                    done = _real(store).put(path, sums.add(b"") if first is None else first, use_multipart=False)
                else:
                    every = chain([first or b"", second], parts)
                    done = _real(store).put(
                        path, every, use_multipart=True, chunk_size=part_bytes, max_concurrency=_PARTS_AT_ONCE
                    )
                return done["e_tag"] or ""

            tag = tried(place, put, "written")
            if tag.strip('"') in sums.tags() or self.digest(name, sums.size_bytes) == sums.sha256:
                return Sent(sums.size_bytes, sums.sha256, tag)
        raise Passing(place, "holds other bytes than were written to it", "")

    def digest(self, name: str, size_bytes: int) -> str:
        """SHA-256 of what the store gives; empty where the object is not of that size or not there."""
        digest, place = sha256(), self.place(name)
        try:
            if storage_io.size(place).bytes != size_bytes:
                return ""
            for start in range(0, size_bytes, PART_BYTES):
                digest.update(storage_io.read(place, start, min(PART_BYTES, size_bytes - start)))
        except (Missing, storage_io.Mismatch):
            return ""
        return digest.hexdigest()

    def fetch(self, name: str, to: Path) -> None:
        """Brings an object to a file, as the store has it."""
        storage_io.fetch(self.place(name), to)

    def listing(self, below: str = "") -> list[Listed]:
        """All objects below a folder that is named with its slash, or all, sorted."""
        assert not below or below.endswith("/"), below
        place = Place(f"{self.url}/{below}")
        found: list[Listed] = []
        after: str | None = None
        while True:
            page = tried(place, lambda store, path: _page(store, path, after))  # noqa: B023 (called at once)
            found += [self._listed(meta) for meta in page]
            if len(page) < _PAGE:
                return sorted(found, key=lambda one: one.name)
            after = page[-1]["path"]

    def _listed(self, meta: Any) -> Listed:
        name = meta["path"].removeprefix(f"{Place(f'{self.url}/').key}")
        return Listed(name, meta["size"], meta["e_tag"] or "", meta["last_modified"])

    def delete(self, names: Sequence[str]) -> None:
        """Deletes objects; those that are not there are no error."""
        for name in names:
            tried(self.place(name), _deleted, "written")

    def changed(self, name: str) -> datetime:
        """When an object was last written, by the store's clock. `Missing` where there is none."""
        return tried(self.place(name), lambda store, path: store.head(path)["last_modified"])


def prefix(text: str) -> Prefix:
    """The address of a run, or of the folder that holds runs. UserError for what cannot be one."""
    return Prefix(address.checked(text))


def _real(store: Store) -> S3Store | GCSStore:
    return cast("S3Store | GCSStore", store)


def _version(meta: Any) -> Version:
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def _page(store: Store, folder: str, after: str | None) -> list[Any]:
    return list(next(iter(store.list(folder or None, offset=after, chunk_size=_PAGE)), []))


def _deleted(store: Store, path: str) -> None:
    try:
        _real(store).delete(path)
    except (FileNotFoundError, NotFoundError):
        return


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
        self.begin()

    def begin(self) -> None:
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


def _md5(data: bytes) -> str:
    return md5(data, usedforsecurity=False).hexdigest()
