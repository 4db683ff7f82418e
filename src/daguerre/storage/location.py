"""The location of one local or remote file. `expand.py` reads settings as locations."""

from dataclasses import dataclass
from pathlib import Path

from daguerre.credentials import STORES, redact, redacted, scheme

__all__ = ["STORES", "WEB", "Location", "redacted", "scheme"]

WEB = ("http", "https")


@dataclass(frozen=True, order=True)
class Location:
    """A file on the local disk, in an object store or on a web server."""

    url: str
    """An absolute path, or `s3://bucket/key`, `gs://bucket/key` (keys as they are, nothing is percent-encoded), or an
    http(s) address as it was given, which may hold secrets: show `name`, and know it again by `identity`."""

    def __repr__(self) -> str:
        return f"Location({self.name!r})"

    @property
    def scheme(self) -> str:
        """`s3`, `gs`, `http`, `https`, or nothing for a local file."""
        return scheme(self.url)

    @property
    def local(self) -> Path | None:
        """Its path on the local disk; None if it is remote."""
        return None if self.scheme else Path(self.url)

    @property
    def name(self) -> str:
        """For messages: the address without query and user information, printable whatever it holds."""
        return redacted(self.url)

    @property
    def identity(self) -> str:
        """Tells it from others without secrets: it stays the same when the address is signed again."""
        return redact(self.url) if self.scheme else self.url

    @property
    def bucket(self) -> str:
        return self.url.split("/", 3)[2]

    @property
    def key(self) -> str:
        """The name in its bucket; empty where an address names none."""
        return self.url.partition("://")[2].partition("/")[2]
