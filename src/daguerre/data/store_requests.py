"""One request of a store at a time: asked again after a pause while its fault may pass, within bounds.

What the bytes should be is not known here; stores.py and fetching.py check them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from obstore.exceptions import BaseError

from daguerre.data import local_files, store_clients
from daguerre.data.place import WEB, Place
from daguerre.data.store_clients import Store
from daguerre.data.store_errors import Mismatch, StoreError, Unreachable, told

T = TypeVar("T")
READINGS = 6
"""Most readings of the same bytes where they come differently or are not as expected."""


def tried(place: Place, request: Callable[[Store, str], T]) -> T:
    """The answer to a request of the store and the path in it; StoreError once the retries are used up."""
    client, patience = store_clients.client(place), store_clients.PATIENCE
    began, attempt = time.monotonic(), 0
    while True:
        attempt += 1
        try:
            return request(client.store, "" if place.scheme in WEB else place.key)
        except StoreError:
            raise
        except (BaseError, FileNotFoundError, ValueError) as error:
            fault = told(error, place, client.access)
        pause = min(patience.first_pause_seconds * 2 ** (attempt - 1), patience.longest_pause_seconds)
        late = time.monotonic() - began + pause > patience.unreachable_seconds and attempt > 1
        if not fault.passing or attempt >= patience.attempts or (isinstance(fault, Unreachable) and late):
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
        raise Mismatch(place, f"ends at byte {start + len(data):,}, before {start + length:,}", data)
    return data
