"""A prefix of an object store under which a run's objects lie: read, written, created once, replaced, listed, deleted.

Every write is known to have arrived. The store distinguishes two writers of one object (`create`, `replace`), never
by looking first. StoreError for what a store refuses to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import md5
from pathlib import Path
from typing import Any, cast

from obstore.exceptions import AlreadyExistsError, NotFoundError, PreconditionError
from obstore.store import GCSStore, S3Store

from daguerre.storage import address
from daguerre.storage import io as storage_io
from daguerre.storage.clients import Store
from daguerre.storage.errors import Missing, Transient
from daguerre.storage.io import Sent
from daguerre.storage.location import Location
from daguerre.storage.retry import READINGS, with_retries

PART_BYTES = 8 << 20
"""Length of a part of a large object."""

Version = dict[str, str]
"""Tells one content of an object from another, for `replace`."""


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
class Prefix:
    """`s3://bucket/folder` or `gs://bucket/folder`, without a slash at its end."""

    url: str

    def __truediv__(self, name: str) -> Prefix:
        return Prefix(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return Location(self.url).name

    @property
    def last(self) -> str:
        return self.url.rpartition("/")[2]

    def location(self, name: str) -> Location:
        return Location(f"{self.url}/{name}")

    def read(self, name: str) -> tuple[bytes, Version]:
        """An object and its version. StoreError; `Missing` if it does not exist."""

        def got(store: Store, path: str) -> tuple[bytes, Version, str]:
            answer = store.get(path)
            return bytes(answer.bytes()), _version(answer.meta), answer.meta["e_tag"] or ""

        location = self.location(name)
        seen: list[bytes] = []
        for _ in range(READINGS):
            data, version, tag = with_retries(location, got)
            if tag.strip('"') == md5(data, usedforsecurity=False).hexdigest() or data in seen:
                return data, version
            seen.append(data)
        raise Transient(location, "differs in each reading: the connection damages the data", "")

    def write(self, name: str, data: bytes) -> None:
        storage_io.write(self.location(name), data)

    def create(self, name: str, data: bytes) -> Version | None:
        """Creates an object; None if it exists already, whoever came first."""
        return self._conditionally(name, data, "create")

    def replace(self, name: str, data: bytes, version: Version) -> Version | None:
        """Replaces an object of that version; None if it is another one by now, or gone."""
        return self._conditionally(name, data, version)

    def _conditionally(self, name: str, data: bytes, mode: Any) -> Version | None:
        """`data` has to be unlike anything written before: it tells the writer where an answer was lost."""
        location = self.location(name)
        for _ in range(READINGS):

            def put(store: Store, path: str, mode: Any = mode) -> Version | None:
                try:
                    return _version(_writable(store).put(path, data, mode=mode, use_multipart=False))
                except (AlreadyExistsError, PreconditionError):
                    return None
                except NotFoundError:
                    if mode == "create":  # then it is the bucket that is not there
                        raise
                    return None

            version = with_retries(location, put, "written")
            try:
                there, current = self.read(name)
            except Missing:
                return None
            if there == data:
                return current
            if version is None or current.get("e_tag") != version.get("e_tag"):  # another writer's
                return None
            mode = version  # ours, damaged in transit
        raise Transient(location, "has other bytes than were written to it", "")

    def send(self, name: str, chunks: Callable[[], Iterable[Any]], about_bytes: int = 0) -> Sent:
        """Creates or replaces an object of any size from pieces of memory, which `chunks` makes again for each try."""
        return storage_io.send(self.location(name), chunks, PART_BYTES, about_bytes)

    def digest(self, name: str, size_bytes: int) -> str:
        """SHA-256 of an object as the store gives it; empty if it is not of that size or does not exist."""
        return storage_io.stored_sha256(self.location(name), size_bytes)

    def fetch(self, name: str, to: Path) -> None:
        storage_io.fetch(self.location(name), to)

    def listing(self, below: str = "") -> list[Listed]:
        """All objects, or those below a folder that is named with its slash, sorted."""
        assert not below or below.endswith("/"), below
        return self._listed(storage_io.entries(Location(f"{self.url}/{below}")))

    def level(self) -> tuple[list[Listed], list[str]]:
        """The objects right below, and the names of the folders there; both sorted."""
        metas, folders = storage_io.level(Location(f"{self.url}/"))
        return self._listed(metas), sorted(name.rstrip("/").rpartition("/")[2] for name in folders)

    def _listed(self, metas: list[Any]) -> list[Listed]:
        start = Location(f"{self.url}/").key
        found = [Listed(m["path"].removeprefix(start), m["size"], m["e_tag"] or "", m["last_modified"]) for m in metas]
        return sorted(found, key=lambda one: one.name)

    def delete(self, names: Sequence[str]) -> None:
        """Deletes objects; those that do not exist are no error."""
        for name in names:
            with_retries(self.location(name), _deleted, "written")

    def changed(self, name: str) -> datetime:
        """Time of the last write, by the store's clock. `Missing` if the object does not exist."""
        return with_retries(self.location(name), lambda store, path: store.head(path)["last_modified"])


def prefix(text: str) -> Prefix:
    """The address of a run, or of the folder that holds runs. UserError for anything else."""
    return Prefix(address.checked(text))


def _writable(store: Store) -> S3Store | GCSStore:
    return cast("S3Store | GCSStore", store)


def _version(meta: Any) -> Version:
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def _deleted(store: Store, path: str) -> None:
    try:
        _writable(store).delete(path)
    except (FileNotFoundError, NotFoundError):
        return
