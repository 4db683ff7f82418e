"""The digest of its tensors in the header of each file of an adapter that this program writes: checked when it is read.

The key is modelspec's, SHA-256 of what follows the header. Programs that change a file and count again leave it, or
sd-scripts' own digest, right; a file whose digests are all of other tensors is damaged.
"""

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from torch import Tensor

from daguerre.checkpoint.safetensors import encode
from daguerre.errors import UserError
from daguerre.models.weights.files import opened
from daguerre.regular import check_regular

VERSION = "daguerre.version"
"""Key of a header of a file that this program wrote."""
KOHYA_DIGEST, DIGEST = "sshs_model_hash", "modelspec.hash_sha256"


def sealed(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Keys for the header of a file of these tensors, by which it is checked when it is read."""
    found = hashlib.sha256()
    for chunk in [*encode(tensors, {})][1:]:
        found.update(chunk)
    return {VERSION: version("daguerre"), DIGEST: f"0x{found.hexdigest()}"}


def check(path: Path) -> None:
    """UserError for a file of this program whose tensors are not those that its header has the digest of."""
    with opened(path) as file:
        metadata = file.metadata() or {}
    # Either digest will do: a program that changes metadata keeps one and counts the other.
    told = {metadata[key].lower().removeprefix("0x") for key in (KOHYA_DIGEST, DIGEST) if metadata.get(key)}
    if VERSION in metadata and told and payload(path) not in told:
        raise UserError(
            f"{path} is damaged: its tensors are not those that its header has the SHA-256 of. Copy the file again, or "
            "make it again where it came from",
            code="damaged",
        )


def payload(path: Path) -> str:
    """SHA-256 of what follows the header of a safetensors file."""
    stat = path.stat()
    return _payload(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))


@lru_cache(maxsize=64)
def _payload(path: Path, stamp: tuple[int, ...]) -> str:
    """`stamp` says when it must be read again."""
    check_regular(path)
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        return hashlib.file_digest(file, "sha256").hexdigest()
