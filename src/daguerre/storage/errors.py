"""Faults of stores and web servers.

The libraries' messages hold addresses with signatures, keys and whole answers of servers: none of their text is passed
on, only the HTTP status, the store's error code and the kind of the fault.
"""

import re
from typing import Any

from obstore.exceptions import (
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)

from daguerre.storage.location import STORES, Location


class StoreError(OSError):
    """A file that cannot be read or written. The message holds no credentials."""

    def __init__(self, location: Location, what: str, setting: str = "data.path") -> None:
        super().__init__()
        self.location = location
        self.what = what
        """The message without the file and the setting."""
        self.setting = setting
        """The setting that names the place; empty if none does."""

    passing = False
    """True if the same request may succeed a moment later."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.location, self.what, self.setting)

    def __str__(self) -> str:
        return f"{self.setting}: {self.explanation}" if self.setting else self.explanation

    @property
    def explanation(self) -> str:
        """The message without the setting."""
        return f"{self.location.name} {self.what}"


class Transient(StoreError):
    """A fault that may pass: an error of the server, a broken connection, a missing answer."""

    passing = True


class Unreachable(Transient):
    """No connection, or no answer."""


class Missing(StoreError, FileNotFoundError):
    """No file of that name exists."""


class BadName(StoreError):
    """A name that cannot be requested: of the file itself or, in a listing, of a file below it."""


class NoRanges(StoreError):
    """A web server that sends files whole only."""


class Mismatch(StoreError):
    """Bytes that were equal at several readings and are not the expected ones: they are stored that way (damaged,
    truncated or replaced)."""

    def __init__(self, location: Location, what: str, setting: str = "data.path", data: bytes = b"") -> None:
        super().__init__(location, what, setting)
        self.data = data
        """The stored bytes; shorter than asked for if the file ends before."""


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_REGION = re.compile(r"<Region>([a-z0-9-]{1,30})</Region>")
_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504, 507, 509, 520, 521, 522, 523, 524}
_PASSING_CODES = {"RequestTimeout", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "SlowDown"}
_PASSING_CODES |= {"InvalidPart", "InvalidPartOrder", "MalformedXML"}  # a request that was damaged in transit
_LATE = "no answer in time"
_FAULTS = (
    # text of the library, what it means
    ("certificate", "the server's certificate is not trusted"),
    ("dns error", "no such host"),
    ("Connection refused", "the connection was refused"),
    ("TimedOut", _LATE),
    ("kind: Timeout", _LATE),
    ("kind: Connect", "no connection"),
    ("kind: Body", "the connection broke in the middle of an answer"),
    ("kind: Decode", "the connection broke in the middle of an answer"),
)


def translated(
    error: BaseError | OSError | ValueError, location: Location, access: str, done: str = "read"
) -> StoreError:
    """A library's error as a StoreError; `access` names endpoint and credentials, `done` is `read` or `written`."""
    text = str(error)
    status = int(found[1]) if (found := _STATUS.search(text)) else None
    code = found[1] if (found := _CODE.search(text)) else ""
    if status == 404 or isinstance(error, FileNotFoundError):
        what = "is in a bucket that does not exist" if code == "NoSuchBucket" else "does not exist"
        return Missing(location, f"{what} ({access})")
    if status is not None:
        return _answered(status, code, text, location, access, done)
    if "BareRedirect" in text:  # elsewhere, without the region
        return _elsewhere(location, access, "")
    if isinstance(error, UnauthenticatedError | PermissionDeniedError):
        return StoreError(location, f"cannot be {done}: the credentials cannot be used or renewed ({access})")
    if isinstance(error, NotSupportedError):
        return NoRanges(location, "is on a server that only sends whole files (it does not support range requests)")
    if isinstance(error, InvalidPathError) or "Could not parse path" in text:
        return BadName(location, "has a name that cannot be requested: with an empty part (//), . or ..")
    return _unanswered(text, location, access)


def _answered(status: int, code: str, text: str, location: Location, access: str, done: str) -> StoreError:
    answer = f"HTTP {status}{f' {code}' if code else ''}"
    if status in _PASSING_STATUS or code in _PASSING_CODES:
        return Transient(location, f"cannot be {done}: the server repeatedly answered {answer} ({access})")
    if status == 412:
        return StoreError(location, "was replaced while it was being read")
    if status == 416:
        return Mismatch(location, "ends before the requested bytes")
    if status in (301, 307) or code in ("AuthorizationHeaderMalformed", "PermanentRedirect"):
        return _elsewhere(location, access, found[1] if (found := _REGION.search(text)) else "")
    if status in (401, 403):
        return StoreError(location, f"may not be {done}: {answer} ({access}). {_rights(location, access, done)}")
    return StoreError(location, f"cannot be {done}: the server answered {answer} ({access})")


def _elsewhere(location: Location, access: str, region: str) -> StoreError:
    name = f" ({region})" if region else ""
    return StoreError(location, f"is in another region{name}: set AWS_REGION to the bucket's region ({access})")


def _rights(location: Location, access: str, done: str) -> str:
    if done == "written":
        return (
            "Check the name and that these credentials may read, write, list and delete there, and have not expired"
            if "no credentials" not in access
            else "Nothing can be written without credentials: set them up"
        )
    if location.scheme not in STORES:
        return "Check whether the address has expired or needs a login"
    if "no credentials" in access:
        return "Only public buckets can be read without credentials: set them up, or check the name"
    skip = "AWS_SKIP_SIGNATURE=true" if location.scheme == "s3" else "GOOGLE_SKIP_SIGNATURE=true"
    return (
        "Check the name (without the right to list a bucket, missing files look like this, too) and that these "
        f"credentials may read it and have not expired; for a public bucket, set {skip}"
    )


def _unanswered(text: str, location: Location, access: str) -> StoreError:
    if "Content-Length" in text:
        return StoreError(
            location, "has no known size: the server does not send one, as for pages that are generated on request"
        )
    why = next((meaning for sign, meaning in _FAULTS if sign in text), "the request failed")
    check = "endpoint, region and credentials" if location.scheme in STORES else "the address and the network"
    kind = Unreachable if "kind: Connect" in text or why == _LATE else Transient
    return kind(location, f"cannot be reached after several tries: {why} ({access}). Check {check}")
