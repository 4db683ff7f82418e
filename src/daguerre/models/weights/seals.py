"""Files of weights that this program writes: their numbers are finite, and their header has the digest of their
tensors, which is checked when they are read.

The key is modelspec's, SHA-256 of what follows the header. Programs that change a file and count again leave it, or
sd-scripts' own digest, right; a file whose digests are all of other tensors is damaged. Of whole models some programs
copy the header and write other tensors: those are no longer the ones of which the digest tells.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from daguerre.checkpoint.atomic import write_durably
from daguerre.checkpoint.safetensors import Later, dtype_name, encode
from daguerre.errors import UserError
from daguerre.models.weights import file_digests
from daguerre.models.weights.opening import opened
from daguerre.regular import check_regular

VERSION = "daguerre.version"
"""Key of a header of a file that this program wrote."""
KOHYA_DIGEST, DIGEST = "sshs_model_hash", "modelspec.hash_sha256"
_OUTLINE = "daguerre.tensors"
"""Key of a header: a digest of names, types and shapes of the tensors that its file was written with."""
_BLANK = f"0x{'?' * 64}"
"""Stands in a header for the digest of tensors that are still to be written."""


def write(path: Path, tensors: Mapping[str, Tensor | Later], metadata: Mapping[str, str] | None = None) -> None:
    """Creates `path` (it must not exist) with these tensors and a header, and waits until the disk has it. UserError
    for a number that is not finite: the caller removes what has been written."""
    digest = hashlib.sha256()

    def chunks() -> Iterator[Any]:
        forms = {name: (dtype_name(tensor.dtype, name), tensor.shape) for name, tensor in tensors.items()}
        seal = {VERSION: version("daguerre"), _OUTLINE: _outline(forms), DIGEST: _BLANK}
        made = encode(finite(tensors), {**(metadata or {}), **seal})
        yield next(made)
        for chunk in made:
            digest.update(chunk)
            yield chunk

    write_durably(path, chunks())
    # Filled in afterwards: the header comes first, and tensors are made one by one, once.
    with open(path, "r+b") as file:
        header = file.read(8 + int.from_bytes(file.read(8), "little"))
        file.seek(8 + header.index(_BLANK.encode()))
        file.write(f"0x{digest.hexdigest()}".encode())
        file.flush()
        os.fsync(file.fileno())


def seal(path: Path) -> None:
    """Gives the file of another writer, in its place, a header as `write` has it. UserError as there."""
    aside = path.with_name(f".{path.name}")
    os.rename(path, aside)
    try:
        with opened(aside) as file:
            write(path, {name: file.get_tensor(name) for name in file.keys()}, file.metadata())  # noqa: SIM118
    finally:
        aside.unlink()


def finite(tensors: Mapping[str, Tensor | Later]) -> dict[str, Later]:
    """The tensors, each with a UserError where it has NaN or infinity in it when it is written."""
    return {
        name: Later(tensor.dtype, tuple(tensor.shape), partial(_finite, name, tensor))
        for name, tensor in tensors.items()
    }


def _finite(name: str, given: Tensor | Later) -> Tensor:
    made = given.make() if isinstance(given, Later) else given
    if made.is_floating_point() and made.numel():
        # NaN is both the least and the most; torch has no order among 8-bit floats.
        least, most = (made.float() if made.itemsize == 1 else made).aminmax()
        if not (least.isfinite() and most.isfinite()):
            raise UserError(
                f"{name} has NaN or infinity in it, as {str(made.dtype).removeprefix('torch.')}: nothing is written. "
                "Use another copy of the model, or another dtype where its numbers are too large for this one",
                code="damaged",
            )
    return made


def _outline(forms: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    """The digest of names, types and shapes."""
    rows = sorted([name, dtype, [*shape]] for name, (dtype, shape) in forms.items())
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def check(path: Path, large: bool = False) -> None:
    """UserError for a file of this program whose tensors are not those that its header has the digest of. Of a large
    file that is remembered as long as it was not touched: a whole network is read only once for it."""
    with opened(path) as file:
        metadata = file.metadata() or {}
        if _OUTLINE in metadata:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            forms = {name: (each.get_dtype(), each.get_shape()) for name, each in slices.items()}
            if metadata[_OUTLINE] != _outline(forms):
                return
    # Either digest will do: a program that changes metadata keeps one and counts the other.
    told = {metadata[key].lower().removeprefix("0x") for key in (KOHYA_DIGEST, DIGEST) if metadata.get(key)}
    if VERSION in metadata and told and (_remembered(path) if large else payload(path)) not in told:
        raise UserError(
            f"{path} is damaged: its tensors are not those that its header has the SHA-256 of. Copy the file again, or "
            "make it again where it came from",
            code="damaged",
        )


def are_whole(folder: Path) -> bool:
    """True if all files of tensors in a folder, at any depth, can be opened and are as their headers say."""
    try:
        for path in folder.rglob("*.safetensors"):
            check(path, large=True)
    except UserError:
        return False
    return True


def _remembered(path: Path) -> str:
    return file_digests.remembered({**file_digests.stamp(path), "of": "payload"}, lambda: payload(path))


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
