"""Pictures that are dropped on the page: a new folder below a root, and files that are kept once they are decoded."""

import io
import os
import re
import shutil
import unicodedata
from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from daguerre import documents
from daguerre.checkpoint.atomic import locked, make_folder, sync_folder, write_bytes_atomically
from daguerre.data import alternatives
from daguerre.data.folder.captions import CAPTION, TEXT_BYTES, TEXT_FILES
from daguerre.data.folder.scan import SUFFIXES
from daguerre.data.images import headers
from daguerre.data.images.headers import Undecodable
from daguerre.data.leftovers import is_leftover
from daguerre.errors import UserError
from daguerre.formatting import format_size
from daguerre.serve.dataset.folders import Folders, Place
from daguerre.serve.pictures import DECODING

MOST_BYTES = 64 << 20
"""Of one file."""
MOST_AT_ONCE = 4
"""Files that are received at a time: each is held in memory."""
MOST_FILES = 10_000
"""In one folder."""
LEAST_FREE_BYTES = 1 << 30
"""Left on the disk."""
_NAME_BYTES = 150
_ODD = re.compile(r'[\x00-\x1f\x7f<>:"/\\|?*={}\[\]$`%#&;!~^\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]')
"""Characters that file systems, shells and command lines take for something else, or that turn the order of letters."""
_ARCHIVES = (".zip", ".tar", ".gz", ".7z", ".rar", ".tgz", ".xz", ".zst")


class New(BaseModel):
    """Message of a page."""

    model_config = ConfigDict(extra="forbid")

    root: int = Field(ge=0)
    name: str = Field(min_length=1, max_length=200)


def new_folder(folders: Folders, given: bytes) -> Place:
    """Makes the folder that a page asks for. UserError for a name that is taken, or none."""
    wanted = documents.sent(New.model_validate_json, given, "the page sent no name of a folder")
    try:
        root = folders.roots[wanted.root]
    except IndexError:
        raise UserError("there is no such root") from None
    name = safe_name(wanted.name)
    path = root / name
    make_folder(root)
    try:
        path.mkdir()
    except FileExistsError:
        raise UserError(f"there is {name} already: give the folder another name", code="conflict") from None
    sync_folder(root)
    return folders.added(path, root)


def safe_name(text: str) -> str:
    """A name of a file or folder, from one that somebody gave. UserError for one of which nothing is left."""
    last = unicodedata.normalize("NFC", text.replace("\\", "/").rsplit("/", 1)[-1])
    kept = _ODD.sub("_", last.encode(errors="replace").decode()).strip(" .-")
    stem, suffix = os.path.splitext(kept)
    while len(os.fsencode(stem + suffix)) > _NAME_BYTES and stem:
        stem = stem[:-1]
    name = (stem + suffix).strip()
    if not name or len(os.fsencode(name)) > _NAME_BYTES or is_leftover(name):
        raise UserError(f"{text[:80]!r} gives no name of a file: use letters and numbers")
    return name


def check_room(place: Place, size: str | None) -> None:
    """UserError for a file that is too large by what its header says, for a full folder and for a full disk."""
    if size is not None and size.isdecimal() and int(size) > MOST_BYTES:
        raise _too_large()
    if len(os.listdir(place.path)) >= MOST_FILES:
        raise UserError(f"the folder has {MOST_FILES:,} files already, as many as the page puts into one")
    if shutil.disk_usage(place.path).free < LEAST_FREE_BYTES + MOST_BYTES:
        raise UserError(f"the disk has less than {format_size(LEAST_FREE_BYTES + MOST_BYTES)} left")


async def received(chunks: AsyncIterator[bytes]) -> bytes:
    """The bytes of a file. UserError for too many."""
    found, size = list[bytes](), 0
    async for chunk in chunks:
        size += len(chunk)
        if size > MOST_BYTES:
            raise _too_large()
        found.append(chunk)
    return b"".join(found)


def _too_large() -> UserError:
    return UserError(f"files of up to {format_size(MOST_BYTES)} are taken here: copy larger ones into the folder")


def keep(place: Place, given: str, data: bytes) -> dict[str, Any]:
    """Keeps a file in a folder if it is a picture or a caption; its name there. UserError."""
    name = safe_name(given)
    stem, suffix = os.path.splitext(name)
    if suffix.lower() in _ARCHIVES or data[:4] == b"PK\x03\x04":
        raise UserError(f"{name} is an archive: unpack it, and drop the pictures")
    if suffix.lower() in TEXT_FILES:
        _check_caption(name, data)
    else:
        suffixes = SUFFIXES[_decoded(name, data)]
        if suffix.lower() not in suffixes:
            name = f"{stem}{suffixes[0]}"
    with locked(place.path):  # of two files of one name that come at once, the second gets another one
        return _put(place, name, data)


def _put(place: Place, name: str, data: bytes) -> dict[str, Any]:
    stem, suffix = os.path.splitext(name)
    others = [] if suffix.lower() in TEXT_FILES else [f"{stem}-{i}{suffix}" for i in range(2, 100)]
    for free in (name, *others):
        path = place.path / free
        if path.exists() and path.read_bytes() == data:
            return {"name": free, "known": True}
        if not os.path.lexists(path):
            try:
                write_bytes_atomically(path, data)
            except PermissionError as error:
                raise UserError(f"{place.path.name} cannot be written to: {error.strerror}") from error
            return {"name": free, "known": False}
    raise UserError(f"there is another {name} already: rename the file", code="conflict")


def _decoded(name: str, data: bytes) -> str:
    """The format of a picture that training can decode. UserError."""
    try:
        with DECODING:
            image = headers.opened(io.BytesIO(data), headers.USUAL)
            image.load()
    except Undecodable as error:
        raise UserError(f"{name}: {error}", code="damaged") from error
    except headers.BROKEN as error:
        raise UserError(f"{name} is damaged: it cannot be decoded", code="damaged") from error
    return str(image.format).lower()


def _check_caption(name: str, data: bytes) -> None:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{name} is no text in UTF-8", code="damaged") from None
    if len(data) > TEXT_BYTES or "\0" in text or not alternatives.of_value(CAPTION, text):
        raise UserError(f"{name} is no caption that training reads")
