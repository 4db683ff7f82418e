"""One request of a store at a time: asked again after a pause while its fault may pass, within bounds.

What the bytes should be is not known here; storage/io.py and storage/download.py check them.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from obstore.exceptions import BaseError

from daguerre.storage import clients, local_files
from daguerre.storage.clients import Store
from daguerre.storage.errors import Mismatch, Missing, StoreError, Unreachable, told
from daguerre.storage.location import WEB, Place

T = TypeVar("T")
READINGS = 12
"""Most readings of the same bytes where they come differently or are not as expected."""


@dataclass(frozen=True)
class Stat:
    """A file from outside."""

    bytes: int
    """Its size."""
    version: str
    """Changes when the file does: the store's entity tag, or the time of the last change."""


def tried(place: Place, request: Callable[[Store, str], T], done: str = "read") -> T:
    """The answer to a request of the store and the path in it; StoreError once the retries are used up.

    `done` is `written` for a request that writes: its connection has the patience that sending takes, and asks again by
    itself.
    """
    client, patience = clients.client(place, done == "written"), clients.PATIENCE
    began, attempt = time.monotonic(), 0
    while True:
        attempt += 1
        try:
            answer = request(client.store, clients.path_in(place))
            client.answered.set()
            return answer
        except StoreError:
            raise
        except (BaseError, FileNotFoundError, ValueError) as error:
            fault = told(error, place, client.access, done)
        pause = min(patience.first_pause_seconds * 2 ** (attempt - 1), patience.longest_pause_seconds)
        late = attempt > 1 and time.monotonic() - began + pause > patience.unreachable_seconds
        hopeless = isinstance(fault, Unreachable) and late and not client.answered.is_set()
        if not fault.passing or attempt >= patience.attempts or hopeless:
            raise fault
        time.sleep(pause * random.uniform(0.5, 1))


def ranged(place: Place, start: int, length: int, version: str = "") -> bytes:
    """`length` bytes from `start` on, as they came; `Mismatch` where the file ends before. Nothing is checked.

    With the entity tag of a store as `version` it is one and the same object, or a StoreError.
    """
    if place.local is not None:
        data = local_files.read(place.local, start, length)
    else:
        options: dict[str, Any] = {"range": (start, start + length)}
        if version.startswith('"'):
            options["if_match"] = version
        data = tried(place, lambda store, path: bytes(store.get(path, options=options).bytes()))  # type: ignore[arg-type]
    if len(data) != length:
        raise Mismatch(place, f"ends at byte {start + len(data):,}, before {start + length:,}", data=data)
    return data


def size(place: Place) -> Stat:
    """Size and version. StoreError (`Missing` where there is nothing), or OSError of the local disk."""
    if place.local is not None:
        found = os.stat(place.local)
        return Stat(found.st_size, str(found.st_mtime_ns))
    try:
        return _stat(tried(place, lambda store, path: store.head(path)))
    except StoreError as error:
        if place.scheme not in WEB or error.passing or isinstance(error, Missing):
            raise
        return _stat(
            tried(place, lambda store, path: store.get(path).meta)
        )  # some servers and signatures know only GET


def _stat(meta: Any) -> Stat:
    return Stat(meta["size"], meta["e_tag"] or meta["last_modified"].isoformat())
