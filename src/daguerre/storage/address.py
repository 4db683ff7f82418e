"""What is an address of a run in an object store, and what cannot be one. Text alone: nothing is asked for."""

from __future__ import annotations

from daguerre.credentials import is_cut, put_aside
from daguerre.errors import UserError
from daguerre.storage.location import STORES, Place, scheme


def is_far(text: str) -> bool:
    """Whether a text is an address, not a path of this machine."""
    return bool(scheme(text))


def checked(text: str) -> str:
    """The address of a run, or of a folder of runs, in one spelling, without a slash at its end. UserError for what
    cannot be one."""
    kind = scheme(text)
    if kind not in STORES:
        raise UserError(f"{Place(text).name}: runs are kept in a local folder or under s3:// or gs://, not {kind}://")
    bucket, _, rest = text.rstrip("/").partition("://")[2].partition("/")
    if is_cut(text) or put_aside(text) != text:
        raise UserError(f"{Place(text).name}: credentials come from the environment, never from an address")
    if not bucket or any(part in ("", ".", "..") for part in rest.split("/") if rest):
        raise UserError(f"{Place(text).name}: give {kind}://BUCKET/FOLDER, without empty parts, . or ..")
    return f"{kind}://{bucket}/{rest}".rstrip("/")
