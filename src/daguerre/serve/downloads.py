"""Checkpoints and exports of a run, to take away: single files, or a folder as one tar."""

import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from daguerre.checkpoint.run_dir import EXPORTS, RunFolder
from daguerre.formatting import format_size
from daguerre.report.html import Html, element, join, table
from daguerre.serve.bounds import check_file, within

_NAME = re.compile(r"[a-z]+-\d{1,12}")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Item:
    """A file or a folder that can be downloaded."""

    id: str
    name: str
    """Its path in the run folder."""
    path: Path
    size_bytes: int

    @property
    def is_folder(self) -> bool:
        return self.path.is_dir()


def items(folder: Path, roots: tuple[Path, ...]) -> list[Item]:
    """All there is, exports first, then checkpoints, the newest first."""
    paths = RunFolder(folder)
    found = []
    for name in EXPORTS:
        place = folder / name
        if place.is_dir() and within(place, roots):
            found.append(_item(folder, place))
            found += [_item(folder, file) for file in sorted(place.iterdir()) if _is_single(file, roots)]
    if within(paths.checkpoints, roots):
        found += [_item(folder, path) for path in _checkpoints(paths.checkpoints)]
    return found


def _checkpoints(folder: Path) -> list[Path]:
    """Folders of checkpoints, the newest first; `checkpoint.store` would load torch."""
    named = {path: _NAME.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ())}
    return sorted((path for path, match in named.items() if match), key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def listing(folder: Path, roots: tuple[Path, ...]) -> Html | None:
    """The table of what can be downloaded; None if there is nothing."""
    rows: list[list[object]] = [
        [element("a", f"{one.name}{'.tar' * one.is_folder}", href=f"file/{one.id}", download=True), _size(one)]
        for one in items(folder, roots)
    ]
    return join(table(["File", "Size"], rows, "counts files")) if rows else None


def content(item: Item) -> Iterator[bytes]:
    """A file, as long as it was when it was listed."""
    left = item.size_bytes
    with item.path.open("rb") as file:
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            left -= len(chunk)
            yield chunk


def tar(item: Item, roots: tuple[Path, ...]) -> Iterator[bytes]:
    """A folder as a tar, made as it is sent; files that lie outside the roots are left out."""
    for path in _files(item.path):
        try:
            check_file(path, roots)
            if not within(path, roots):
                continue
        except (OSError, ValueError):
            continue
        with path.open("rb") as file:
            info = tarfile.TarInfo(f"{item.path.name}/{path.relative_to(item.path).as_posix()}")
            info.size, info.mode = os.fstat(file.fileno()).st_size, 0o644
            yield info.tobuf(tarfile.PAX_FORMAT)
            left = info.size
            while left:
                # A file that shrinks meanwhile is filled up: its size stands in the head already.
                chunk = file.read(min(left, _CHUNK_BYTES)) or bytes(min(left, _CHUNK_BYTES))
                left -= len(chunk)
                yield chunk
            yield bytes(-info.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _item(folder: Path, path: Path) -> Item:
    name = path.relative_to(folder).as_posix()
    sizes = (file.stat().st_size for file in (_files(path) if path.is_dir() else [path]) if file.exists())
    return Item(sha256(os.fsencode(name)).hexdigest()[:12], name, path, sum(sizes))


def _is_single(path: Path, roots: tuple[Path, ...]) -> bool:
    """True for weights, which other programs open by themselves."""
    return path.suffix == ".safetensors" and path.is_file() and within(path, roots)


def _files(folder: Path) -> list[Path]:
    return sorted(Path(place) / name for place, _, names in os.walk(folder) for name in names)


def _size(item: Item) -> str:
    return format_size(item.size_bytes)
