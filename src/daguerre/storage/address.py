"""Addresses of runs in object stores, as text: nothing is requested."""

from daguerre.credentials import is_cut, redact
from daguerre.errors import UserError
from daguerre.storage.location import STORES, Location, scheme


def is_remote(text: str) -> bool:
    """True for an address, False for a path of this machine."""
    return bool(scheme(text))


def checked(text: str) -> str:
    """The address of a run or of a folder of runs, without a slash at its end. UserError for anything else."""
    kind = scheme(text)
    if kind not in STORES:
        raise UserError(
            f"{Location(text).name}: runs are kept in a local folder or under s3:// or gs://, not {kind}://",
            code="unsupported",
        )
    bucket, _, rest = text.rstrip("/").partition("://")[2].partition("/")
    if is_cut(text) or redact(text) != text:
        raise UserError(f"{Location(text).name}: credentials come from the environment, never from an address")
    if not bucket or any(part in ("", ".", "..") for part in rest.split("/") if rest):
        raise UserError(f"{Location(text).name}: give {kind}://BUCKET/FOLDER, without empty parts, . or ..")
    return f"{kind}://{bucket}/{rest}".rstrip("/")
