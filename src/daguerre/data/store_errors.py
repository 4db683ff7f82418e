"""What went wrong at a store, in words of our own.

The libraries' messages hold addresses with signatures, keys and whole answers of servers: none of their text is passed
on, only the HTTP status, the store's error code and what kind of fault it was.
"""

from __future__ import annotations

import re

from obstore.exceptions import BaseError, InvalidPathError, NotSupportedError, PreconditionError

from daguerre.data.place import Place


class StoreError(OSError):
    """A place that cannot be read or written. The message holds no credentials."""

    def __init__(self, place: Place, what: str, setting: str = "data.path") -> None:
        super().__init__()
        self.place = place
        """Where."""
        self.what = what
        """What happened and what to do, without the place and the setting."""
        self.setting = setting
        """Which setting names the place; empty if none does."""

    passing = False
    """Whether the same request may succeed a moment later."""

    def __str__(self) -> str:
        return f"{self.setting}: {self.told}" if self.setting else self.told

    @property
    def told(self) -> str:
        """The message without the setting."""
        return f"{self.place.name} {self.what}"


class Passing(StoreError):
    """A fault that may be over soon: an error of the server, a connection that broke, an answer that did not come."""

    passing = True


class Unreachable(Passing):
    """No connection at all."""


class Missing(StoreError, FileNotFoundError):
    """There is nothing of that name."""


class NoRanges(StoreError):
    """A web server that sends files whole only."""


class Mismatch(StoreError):
    """The bytes came alike several times and are not those that were expected: they are stored that way (damaged, cut
    or replaced)."""

    def __init__(self, place: Place, what: str, data: bytes = b"") -> None:
        super().__init__(place, what)
        self.data = data
        """What is stored there; shorter than asked for if the file ends before."""


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_REGION = re.compile(r"<Region>([a-z0-9-]{1,30})</Region>")
_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504, 507, 509, 520, 521, 522, 523, 524}
_PASSING_CODES = {"RequestTimeout", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "SlowDown"}
_FAULTS = (
    # text of the library, what it means
    ("certificate", "the server's certificate is not trusted"),
    ("dns error", "no such host"),
    ("Connection refused", "the connection was refused"),
    ("TimedOut", "no answer in time"),
    ("kind: Timeout", "no answer in time"),
    ("kind: Connect", "no connection"),
    ("kind: Body", "the connection broke in the middle of an answer"),
    ("kind: Decode", "the connection broke in the middle of an answer"),
)


def told(error: BaseError | OSError | ValueError, place: Place, access: str) -> StoreError:
    """The fault in our own words; `access` says by which endpoint and with which credentials the place was asked."""
    text = str(error)
    status = int(found[1]) if (found := _STATUS.search(text)) else None
    code = found[1] if (found := _CODE.search(text)) else ""
    if status is not None and not isinstance(error, FileNotFoundError):
        return _answered(status, code, text, place, access)
    if isinstance(error, FileNotFoundError):
        return Missing(place, _missing(code, access))
    if isinstance(error, PreconditionError):
        return StoreError(place, "was replaced while it was read")
    if isinstance(error, NotSupportedError):
        return NoRanges(place, "is on a server that sends files whole only (it does not answer range requests)")
    if isinstance(error, InvalidPathError):
        return StoreError(place, "is no name that can be asked for: empty parts (//), . and .. are not")
    return _unanswered(text, place, access)


def _missing(code: str, access: str) -> str:
    what = "is in a bucket that does not exist" if code == "NoSuchBucket" else "does not exist"
    return f"{what} ({access})"


def _answered(status: int, code: str, text: str, place: Place, access: str) -> StoreError:
    answer = f"HTTP {status}{f' {code}' if code else ''}"
    if status in _PASSING_STATUS or code in _PASSING_CODES:
        return Passing(place, f"cannot be read: the server answered {answer} again and again ({access})")
    if status == 416:
        return Mismatch(place, "ends before the bytes that were asked for")
    if status in (301, 307) or code in ("AuthorizationHeaderMalformed", "PermanentRedirect"):
        region = f" ({found[1]})" if (found := _REGION.search(text)) else ""
        return StoreError(
            place, f"is in another region{region}: {answer}. Set AWS_REGION to the bucket's region ({access})"
        )
    if status in (401, 403):
        return StoreError(place, f"may not be read: {answer} ({access}). {_rights(place, access)}")
    return StoreError(place, f"cannot be read: the server answered {answer} ({access})")


def _rights(place: Place, access: str) -> str:
    if place.scheme not in ("s3", "gs"):
        return "Check whether the address has expired or needs a login"
    if "no credentials" in access:
        return "Only public buckets can be read without credentials: set them up, and check the name"
    skip = "AWS_SKIP_SIGNATURE=true" if place.scheme == "s3" else "GOOGLE_SKIP_SIGNATURE=true"
    return (
        f"Check that these credentials have not expired and may read it; for a public bucket, {skip} asks without them"
    )


def _unanswered(text: str, place: Place, access: str) -> StoreError:
    why = next((meaning for sign, meaning in _FAULTS if sign in text), "the request failed")
    check = "endpoint, region and credentials" if place.scheme in ("s3", "gs") else "address and the network"
    if "Content-Length" in text:
        return StoreError(
            place, "has no size: the server does not say one, as for a page that is made when it is asked for"
        )
    kind = Unreachable if "kind: Connect" in text or "error trying to connect" in text else Passing
    return kind(place, f"cannot be reached: {why}, again and again ({access}). Check {check}")
