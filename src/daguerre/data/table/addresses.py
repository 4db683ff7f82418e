"""Pictures at addresses that tables hold: each fetched whole, when it is trained on.

What is gone or refused for good is `Undecodable`, what may pass an OSError. Shards and tables are
`storage/file_cache.py`'s.
"""

from __future__ import annotations

import re
from hashlib import md5

from obstore.exceptions import BaseError

from daguerre.data.images.headers import Undecodable
from daguerre.storage import clients
from daguerre.storage.clients import Store
from daguerre.storage.errors import Missing, Passing, StoreError
from daguerre.storage.location import Place
from daguerre.storage.retry import READINGS, tried

LIMIT_BYTES = 256 << 20
"""Largest picture that is fetched."""
_STATUS = re.compile(r"HTTP (\d{3})")
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


def fetched(place: Place) -> bytes:
    """The bytes of a file: right by the store's MD5, by the encryption on the way, or because two readings agree."""
    try:
        clients.client(place)
    except (BaseError, ValueError):
        raise Undecodable("an address that cannot be asked for") from None
    seen: set[bytes] = set()
    for _ in range(READINGS):
        data, tag = _once(place)
        digest = md5(data, usedforsecurity=False)
        if place.scheme == "https" or digest.hexdigest() == tag or digest.digest() in seen:
            return data
        seen.add(digest.digest())
    raise Passing(place, f"gives other bytes at each of {READINGS} readings: something on the way damages them", "")


def _once(place: Place) -> tuple[bytes, str]:
    """One reading, and the MD5 that the server names, if it does."""
    try:
        return tried(place, _whole)
    except Missing:
        raise Undecodable("gone: HTTP 404") from None
    except StoreError as error:
        error.setting = ""  # the address stands in the table
        status = int(found[1]) if (found := _STATUS.search(error.what)) else 0
        if status in (404, 410):
            raise Undecodable(f"gone: HTTP {status}") from None
        if 400 <= status < 500 and not error.passing:
            raise Undecodable(f"refused: HTTP {status}") from None
        raise


def _whole(store: Store, path: str) -> tuple[bytes, str]:
    answer = store.get(path)
    if answer.meta["size"] > LIMIT_BYTES:
        raise Undecodable(f"too large: more than {LIMIT_BYTES >> 20} MiB")
    tag = _MD5.fullmatch(answer.meta["e_tag"] or "")
    return bytes(answer.bytes()), tag[1] if tag else ""
