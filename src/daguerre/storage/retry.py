"""One request of a store: retried after a pause while its fault may pass, within bounds. Bytes are not checked here."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from obstore.exceptions import BaseError

from daguerre.regular import asked
from daguerre.storage import clients, local_files
from daguerre.storage.clients import Store
from daguerre.storage.errors import Mismatch, Missing, StoreError, Transient, Unreachable, translated
from daguerre.storage.location import WEB, Location

T = TypeVar("T")
READINGS = 12
"""Most readings of the same bytes that come differently or are not as expected."""


@dataclass(frozen=True)
class Stat:
    """Size and version of a file."""

    bytes: int
    version: str
    """Changes when the file does: the store's entity tag, or `local_files.version`."""


def with_retries(location: Location, request: Callable[[Store, str], T], done: str = "read") -> T:
    """The answer to a request of (store, path in it); StoreError once the retries are used up.

    `done` is `written` for a request that writes: its connection has longer time-outs, and retries parts by itself.
    """
    client, patience = clients.client(location, done == "written"), clients.PATIENCE
    began, attempt = time.monotonic(), 0
    while True:
        attempt += 1
        try:
            answer = request(client.store, clients.path_in(location))
            client.answered.set()
            return answer
        except StoreError:
            raise
        except (BaseError, FileNotFoundError, ValueError) as error:
            fault = translated(error, location, client.access, done)
        pause = min(patience.first_pause_seconds * 2 ** (attempt - 1), patience.longest_pause_seconds)
        late = attempt > 1 and time.monotonic() - began + pause > patience.unreachable_seconds
        hopeless = isinstance(fault, Unreachable) and late and not client.answered.is_set()
        if not fault.passing or attempt >= patience.attempts or hopeless:
            raise fault
        time.sleep(pause * random.uniform(0.5, 1))


def never_alike(location: Location) -> Transient:
    """The fault of a file whose bytes differ at each reading."""
    return Transient(
        location, f"returns different bytes in each of {READINGS} readings: the connection damages the data"
    )


def ranged(location: Location, start: int, length: int, version: str = "") -> bytes:
    """`length` bytes from `start` on, unchecked; `Mismatch` if the file ends before, StoreError if it is another object
    than that of the entity tag `version`."""
    if location.local is not None:
        data = local_files.read(location.local, start, length)
    else:
        options: dict[str, Any] = {"range": (start, start + length)}
        if version.startswith('"'):
            options["if_match"] = version
        data = with_retries(location, lambda store, path: bytes(store.get(path, options=options).bytes()))  # type: ignore[arg-type]
    if len(data) != length:
        raise Mismatch(location, f"ends at byte {start + len(data):,}, before {start + length:,}", data=data)
    return data


def size(location: Location) -> Stat:
    """Size and version. StoreError (`Missing` where there is nothing), or OSError of the local disk."""
    if location.local is not None:
        found = asked(location.local)
        return Stat(found.st_size, local_files.version_of(found))
    try:
        return _stat(with_retries(location, lambda store, path: store.head(path)))
    except StoreError as error:
        if location.scheme not in WEB or error.passing or isinstance(error, Missing):
            raise
        # Some servers and signatures know only GET.
        return _stat(with_retries(location, lambda store, path: store.get(path).meta))


def _stat(meta: Any) -> Stat:
    return Stat(meta["size"], meta["e_tag"] or meta["last_modified"].isoformat())
