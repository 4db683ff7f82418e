"""One file, near or far, and what may be said of it. How a setting is read as places is in places.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

STORES = ("s3", "gs")
WEB = ("http", "https")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True, order=True)
class Place:
    """A file on the local disk, in an object store or on a web server."""

    url: str
    """An absolute path, or `s3://bucket/key`, `gs://bucket/key` (keys as they are, nothing is percent-encoded), or an
    http(s) address as it was given, which may hold secrets: show `name`."""

    @property
    def scheme(self) -> str:
        """`s3`, `gs`, `http`, `https`, or nothing for a local file."""
        return scheme(self.url)

    @property
    def local(self) -> Path | None:
        """Where it lies on the local disk; None if it is far away."""
        return None if self.scheme else Path(self.url)

    @property
    def name(self) -> str:
        """What a person is shown: the address without query and user information, printable whatever it holds."""
        return shown(self.url)

    @property
    def bucket(self) -> str:
        """Of an object in a store."""
        return self.url.split("/", 3)[2]

    @property
    def key(self) -> str:
        """Of an object in a store."""
        return self.url.split("/", 3)[3]


def scheme(text: str) -> str:
    """What stands before `://`, in small letters; nothing for a path."""
    found = _SCHEME.match(text)
    return found[1].lower() if found else ""


def shown(text: str) -> str:
    """A path or an address as messages may hold it: no user, password, query or fragment; of a command, nothing."""
    if text.startswith("pipe:"):
        return "pipe:..."
    if not scheme(text):
        return text.encode("utf-8", "backslashreplace").decode()
    text, rest = text.split("://", 1)
    host, _, path = rest.partition("/")
    if scheme(f"{text}://") not in STORES:
        host, path = re.split(r"[?#]", host)[0], re.split(r"[?#]", path)[0]
        host, path = ("", "...") if _unreadable(f"{text}://{rest}") else (host, path)
    host = host.rpartition("@")[2]
    return f"{text}://{host}/{path}".encode("utf-8", "backslashreplace").decode()


def _unreadable(address: str) -> bool:
    """A password with an unescaped `/` looks like a port that is no number: then nothing of the address is shown."""
    try:
        return urlsplit(address).port == -1
    except ValueError:
        return True
