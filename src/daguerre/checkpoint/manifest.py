"""The manifest of a checkpoint: size and digest of each file, and what refuses a file that differs.

A folder with a sound manifest is complete, because the manifest is written last. Knows nothing of tensors.
No torch here.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from hashlib import file_digest, sha256
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from daguerre import documents, regular
from daguerre.checkpoint.atomic import to_json, write_durably
from daguerre.errors import Code, UserError

NAME = "manifest.json"
_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, regular.Irregular)
FORMAT = 1

Kind = Literal["tensors", "document", "file", "parts", "slices"]
"""`parts` are one rank's slices of tensors, `slices` the index that finds them."""


class CheckpointError(UserError):
    """A checkpoint could not be saved or read; the message says why and what to do."""

    code: Code = "failed"


class Damaged(CheckpointError):
    """A checkpoint is not what was saved; the message names the file."""

    code = "damaged"


@dataclass(frozen=True)
class Entry:
    """One file of a checkpoint."""

    kind: Kind
    size_bytes: int
    sha256: str


def is_safe_path(path: str) -> bool:
    """True if `path` is relative, stays in its folder, and means the same on every system."""
    parts = PurePosixPath(path).parts
    return bool(parts) and path == "/".join(parts) and ".." not in parts and not set(path) & set("\\:\0")


def write(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Write the manifest of files that are already safe on disk."""
    write_durably(folder / NAME, [to_bytes(entries)])


def to_bytes(entries: Mapping[str, Entry], stored: Mapping[str, Any] | None = None) -> bytes:
    """A manifest as a JSON file. `stored`: where the files are, if they are not in its folder."""
    files = {path: asdict(entry) for path, entry in sorted(entries.items())}
    content: dict[str, Any] = {"format": FORMAT, "files": files}
    if stored is not None:
        content["stored"] = dict(stored)
    content["sha256"] = _own_digest(content)
    return to_json(content)


def read(folder: Path) -> dict[str, Entry]:
    """The entries of a checkpoint by path. Damaged if there is no manifest or it differs from what was saved."""
    try:
        data = regular.content(folder / NAME)
    except _NO_FILE:
        raise Damaged(f"{folder.name}/{NAME} is missing: the save did not finish, or the file was removed") from None
    return from_bytes(data, folder.name)[0]


def from_bytes(data: bytes, name: str) -> tuple[dict[str, Entry], dict[str, Any]]:
    """The entries by path and `stored` as `to_bytes` had it; `name` is the checkpoint's, for errors."""
    where = f"{name}/{NAME}"
    try:
        content = documents.parse(data)
        sound = content["sha256"] == _own_digest(content)
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{where} is damaged: {type(error).__name__}: {error}") from None
    if not sound:
        raise Damaged(f"{where} is damaged: it does not match its own digest")
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{where} has format {content['format']!r}, this version of daguerre reads {FORMAT}: "
            "use the version that wrote it, or a newer one"
        )
    if unsafe := [path for path in content["files"] if not is_safe_path(path)]:
        raise CheckpointError(
            f"{where} names files outside its folder ({unsafe[0]!r}): do not trust where it came from"
        )
    return {path: Entry(**entry) for path, entry in content["files"].items()}, content.get("stored", {})


def verify(folder: Path, only: Collection[str] | None = None) -> None:
    """Read every file of a checkpoint, or those in `only`. Damaged, naming the file, if one differs from what was
    saved."""
    for path, entry in read(folder).items():
        if only is not None and path not in only:
            continue
        try:
            regular.check_regular(folder / path)
            with (folder / path).open("rb") as file:
                size_bytes = file.seek(0, 2)
                file.seek(0)
                digest = file_digest(file, "sha256").hexdigest() if size_bytes == entry.size_bytes else ""
        except _NO_FILE:
            raise Damaged(f"{folder.name}/{path} is missing") from None
        _compare(f"{folder.name}/{path}", entry, size_bytes, digest)


def read_file(folder: Path, path: str, entry: Entry) -> bytes:
    """The bytes of one file, verified as read. Damaged if they differ from what was saved."""
    try:
        data = regular.content(folder / path)
    except _NO_FILE:
        raise Damaged(f"{folder.name}/{path} is missing") from None
    _compare(f"{folder.name}/{path}", entry, len(data), sha256(data).hexdigest())
    return data


def extras(folder: Path) -> list[str]:
    """Files in a checkpoint's folder that are not its own, such as `.DS_Store`; they are never read."""
    own = {*read(folder), NAME}
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(set(found) - own)


def _own_digest(content: Mapping[str, Any]) -> str:
    return sha256(to_json({key: value for key, value in content.items() if key != "sha256"})).hexdigest()


def _compare(where: str, entry: Entry, size_bytes: int, digest: str) -> None:
    if size_bytes != entry.size_bytes:
        raise Damaged(f"{where} has {size_bytes} bytes, {entry.size_bytes} were saved")
    if digest != entry.sha256:
        raise Damaged(f"{where} is damaged: its sha256 is {digest[:12]}..., saved was {entry.sha256[:12]}...")
