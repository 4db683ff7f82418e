"""The image of a table's row: bytes in the row, a path or an address; its size, and its bytes when it is trained on.

An image at an address is fetched whole each time. One that is gone or refused for good is `Undecodable`, a fault that
may pass an OSError. No torch here.
"""

import io
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from hashlib import md5
from typing import Any

from obstore.exceptions import BaseError

from daguerre import documents
from daguerre.data.images import headers
from daguerre.data.images.headers import Undecodable
from daguerre.storage import clients, local_files, roots
from daguerre.storage.clients import Store
from daguerre.storage.errors import Missing, StoreError, Transient
from daguerre.storage.location import Location, scheme
from daguerre.storage.retry import READINGS, with_retries

NONE = "no image: the cell is empty"
SCHEMES = ("http", "https", "s3", "gs")
LIMIT_BYTES = 256 << 20
"""Largest image that is fetched."""
_STATUS = re.compile(r"HTTP (\d{3})")
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


class Lacking(Undecodable):
    """A row that has no image or no caption to begin with; nothing is broken."""


def size(value: Any, base: str, formats: Sequence[str]) -> tuple[int, int]:
    """Height and width of an image that is here, upright; (0, 0) at an address, where nothing is fetched.

    `value` is what the image column holds; `base` the table's folder. Raises `Undecodable`.
    """
    held = _held(value)
    if isinstance(held, bytes):
        return headers.upright_size(io.BytesIO(held), formats)
    location = locate(held, base)
    if location.local is None:
        return 0, 0
    try:
        with local_files.opened(location.local) as file:
            return headers.upright_size(file, formats)
    except PermissionError:
        raise Undecodable("file without read permission") from None
    except OSError as error:
        if error.errno not in local_files.NO_FILE:
            error.filename = error.filename or str(location.local)
            raise
        raise Undecodable("there is no image file at the path") from None


def read(value: Any, base: str) -> bytes:
    """The bytes of the image's file. Raises `Undecodable` where it is gone for good; OSError for what may pass."""
    held = _held(value)
    if isinstance(held, bytes):
        return held
    location = locate(held, base)
    if location.local is not None:
        with local_files.opened(location.local) as file:
            return file.read()
    return _fetched(location)


def is_there(value: Any) -> bool:
    """Says whether a cell holds an image, a path or an address."""
    try:
        return bool(_held(value))
    except Lacking:
        return False


def several(value: Any) -> list[Any]:
    """The cells of a cell that may be a list of images; in a cell of text it is written as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError):
            listed = documents.parse(value)
            return listed if all(isinstance(one, str) for one in listed) else [value]
    return [*value] if isinstance(value, list) else [value]


def stored(value: Any) -> bytes:
    """The bytes that the table itself holds of the image: for digests."""
    held = _held(value)
    return held if isinstance(held, bytes) else held.encode("utf-8", "surrogateescape")


def is_held(value: Any) -> bool:
    """Says whether the table itself holds the image."""
    return isinstance(_held(value), bytes)


def _held(value: Any) -> bytes | str:
    """Bytes, or the text of a path or address."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        value = value.strip()
    if not value:
        raise Lacking(NONE)
    assert isinstance(value, bytes | str), type(value)
    return value


def locate(text: str, base: str) -> Location:
    """The place of a path or an address; paths start at `base`, the folder or address of the table's folder. Raises
    `Undecodable` for a text that is neither, and for a place that a queued run may not read."""
    found = _located(text, base)
    if roots.leads_away(found.local) if found.local is not None else roots.outside(found.name):
        raise Undecodable("a path or an address that this run may not read")
    return found


def _located(text: str, base: str) -> Location:
    if "\0" in text or "\n" in text:
        raise Undecodable("neither a path nor an address")
    if scheme(text) in SCHEMES:
        if not text.partition("://")[2].strip("/"):
            raise Undecodable("an address without a host")
        return Location(text)
    if scheme(text) not in ("", "file"):
        raise Undecodable(f"an address of a kind that is not read ({', '.join(SCHEMES)} are)")
    path = re.sub(r"^file:(//)?", "", text)
    path = os.path.expanduser(path)
    if scheme(base) and not os.path.isabs(path):
        return Location(base + path)
    whole = os.path.normpath(os.path.join(base, path))
    if "\\" in path and not os.path.exists(whole):  # as Windows writes it
        whole = os.path.normpath(os.path.join(base, path.replace("\\", "/")))
    return Location(whole)


def _fetched(location: Location) -> bytes:
    """The bytes of a file: right by the store's MD5, by the encryption on the way, or because two readings agree."""
    try:
        clients.client(location)
    except (BaseError, ValueError):
        raise Undecodable("an address that cannot be requested") from None
    seen: set[bytes] = set()
    for _ in range(READINGS):
        data, tag = _once(location)
        digest = md5(data, usedforsecurity=False)
        if location.scheme == "https" or digest.hexdigest() == tag or digest.digest() in seen:
            return data
        seen.add(digest.digest())
    raise Transient(
        location, f"returns different bytes in each of {READINGS} readings: the connection damages the data", ""
    )


def _once(location: Location) -> tuple[bytes, str]:
    """One reading, and the MD5 that the server names, if it does."""
    try:
        return with_retries(location, _whole)
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
