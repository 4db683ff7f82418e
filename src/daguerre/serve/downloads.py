"""Checkpoints and exports of a run, to take away: single files, or a folder as one tar."""

import os
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from daguerre.checkpoint.run_dir import EXPORTS, RunFolder
from daguerre.errors import UserError
from daguerre.formatting import format_size
from daguerre.remote.copies import Copies, Far
from daguerre.report.html import Html, element, join, table
from daguerre.serve.bounds import check_file, within
from daguerre.serve.catalog import Catalog
from daguerre.storage import io as storage_io
from daguerre.storage.errors import StoreError
from daguerre.storage.location import Location

_NAME = re.compile(r"[a-z]+-\d{1,12}")
_CHUNK_BYTES = 1 << 20
_FAR_BYTES = 8 << 20
_KNOWN_SECONDS = 30.0
"""So long what a store has is taken as known."""


@dataclass(frozen=True)
class Item:
    """A file or a folder that can be downloaded."""

    id: str
    name: str
    """Its path in the run folder."""
    size_bytes: int
    is_folder: bool
    sent: Callable[[], Iterator[bytes]]
    """Its bytes; those of a folder as a tar."""


def items(folder: Path, catalog: Catalog) -> list[Item]:
    """All there is, exports first, then checkpoints, the newest first. UserError for a store that cannot be read."""
    far = catalog.copies.far(folder) if catalog.copies else None
    return _far(catalog.copies, far) if catalog.copies and far else _here(folder, catalog.roots)


def _here(folder: Path, roots: tuple[Path, ...]) -> list[Item]:
    paths = RunFolder(folder)
    found = []
    for name in EXPORTS:
        place = folder / name
        if place.is_dir() and within(place, roots):
            found.append(_item(folder, place, roots))
            found += [_item(folder, file, roots) for file in sorted(place.iterdir()) if _is_single(file, roots)]
    if within(paths.checkpoints, roots):
        found += [_item(folder, path, roots) for path in _checkpoints(paths.checkpoints)]
    return found


def _far(copies: Copies, far: Far) -> list[Item]:
    found = []
    try:
        for name, there in copies.sealed(far, _KNOWN_SECONDS):
            files = {path: (far.run.location(f"{name}/{there.folder}/{path}"), entry.size_bytes)
                     for path, entry in there.entries.items()}  # fmt: skip
            size = sum(each.size_bytes for each in there.entries.values())
            found.append(Item(_id(name), name, size, True, partial(_far_tar, name.rpartition("/")[2], files)))
            if name in EXPORTS:
                single = [path for path in files if path.endswith(".safetensors") and "/" not in path]
                found += [
                    Item(
                        _id(f"{name}/{path}"),
                        f"{name}/{path}",
                        files[path][1],
                        False,
                        partial(_far_content, *files[path]),
                    )
                    for path in single
                ]
    except StoreError as error:
        raise UserError(error.explanation, code="unreachable") from error
    return found


def _far_content(location: Location, size_bytes: int) -> Iterator[bytes]:
    for start in range(0, size_bytes, _FAR_BYTES):
        yield storage_io.read(location, start, min(_FAR_BYTES, size_bytes - start))


def _far_tar(name: str, files: Mapping[str, tuple[Location, int]]) -> Iterator[bytes]:
    for path, (location, size_bytes) in files.items():
        yield _head(f"{name}/{path}", size_bytes)
        yield from _far_content(location, size_bytes)
        yield bytes(-size_bytes % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _checkpoints(folder: Path) -> list[Path]:
    """Folders of checkpoints, the newest first; `checkpoint.store` would load torch."""
    named = {path: _NAME.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ())}
    return sorted((path for path, match in named.items() if match), key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def listing(folder: Path, catalog: Catalog) -> Html | None:
    """The table of what can be downloaded; None if there is nothing, or if the store says nothing."""
    try:
        found = items(folder, catalog)
    except UserError:
        return None
    rows: list[list[object]] = [
        [element("a", f"{one.name}{'.tar' * one.is_folder}", href=f"file/{one.id}", download=True), _size(one)]
        for one in found
    ]
    return join(table(["File", "Size"], rows, "counts files")) if rows else None


def _content(path: Path, left: int) -> Iterator[bytes]:
    """A file, as long as it was when it was listed."""
    with path.open("rb") as file:
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            left -= len(chunk)
            yield chunk


def _tar(folder: Path, roots: tuple[Path, ...]) -> Iterator[bytes]:
    """A folder as a tar, made as it is sent; files that lie outside the roots are left out."""
    for path in _files(folder):
        try:
            check_file(path, roots)
            if not within(path, roots):
                continue
        except (OSError, ValueError):
            continue
        with path.open("rb") as file:
            left = size_bytes = os.fstat(file.fileno()).st_size
            yield _head(f"{folder.name}/{path.relative_to(folder).as_posix()}", size_bytes)
            while left:
                # A file that shrinks meanwhile is filled up: its size stands in the head already.
                chunk = file.read(min(left, _CHUNK_BYTES)) or bytes(min(left, _CHUNK_BYTES))
                left -= len(chunk)
                yield chunk
            yield bytes(-size_bytes % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _head(name: str, size_bytes: int) -> bytes:
    """The bytes that stand before a file in a tar."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size_bytes, 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def _item(folder: Path, path: Path, roots: tuple[Path, ...]) -> Item:
    name, is_folder = path.relative_to(folder).as_posix(), path.is_dir()
    size = sum(file.stat().st_size for file in (_files(path) if is_folder else [path]) if file.exists())
    return Item(
        _id(name), name, size, is_folder, partial(_tar, path, roots) if is_folder else partial(_content, path, size)
    )


def _id(name: str) -> str:
    return sha256(os.fsencode(name)).hexdigest()[:12]


def _is_single(path: Path, roots: tuple[Path, ...]) -> bool:
    """True for weights, which other programs open by themselves."""
    return path.suffix == ".safetensors" and path.is_file() and within(path, roots)


def _files(folder: Path) -> list[Path]:
    return sorted(Path(place) / name for place, _, names in os.walk(folder) for name in names)


def _size(item: Item) -> str:
    return format_size(item.size_bytes)
