"""Writing files so that a kill or a power cut leaves the old content or the new one, never a mixture.

Holds the four file-system moves that checkpoints and the run folder are made of. Knows nothing of what is written.
No torch here.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from daguerre import system
from daguerre.fresh import hidden, naming


@dataclass(frozen=True)
class Written:
    """Size and digest of a file by the bytes handed to the system, not by reading it back."""

    size_bytes: int
    sha256: str


def write_durably(path: Path, chunks: Iterable[Any]) -> Written:
    """Create `path` (it must not exist) from chunks of bytes and wait until the disk has it.

    The folder's entry is not yet safe: call `sync_folder` on it. OSError names the file.
    """
    digest, size_bytes = sha256(), 0
    try:
        with open(path, "xb") as file:
            for chunk in chunks:
                digest.update(chunk)
                size_bytes += file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    return Written(size_bytes, digest.hexdigest())


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """`write_atomically` of one chunk."""
    write_atomically(path, [data])


def write_atomically(path: Path, chunks: Iterable[Any]) -> None:
    """Replace or create `path`: a reader, a kill or a power cut finds the old content or the new one, whole.

    One writer at a time; what a killed one left behind (`.NAME.tmp`) is overwritten.
    """
    with replacing(path) as temporary:
        write_durably(temporary, chunks)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write a whole file to, safe on disk; when the block ends it stands as `path`, as `write_atomically`
    puts it there. If the block raises, nothing is left of it."""
    temporary = hidden(path, ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        with naming(path):
            yield temporary
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_json_atomically(path: Path, document: Any) -> None:
    write_bytes_atomically(path, to_json(document))


def to_json(document: Any) -> bytes:
    """UTF-8 JSON that reads back equal. ValueError for NaN, infinity, keys that are no strings, tuples."""
    text = json.dumps(document, allow_nan=False, ensure_ascii=False, indent=1)
    if json.loads(text) != document:
        raise ValueError("holds something JSON does not give back: a tuple, or a key that is no string")
    # Half a character (an undecodable file name in a message) becomes its JSON escape.
    return text.encode(errors="backslashreplace") + b"\n"


def make_folder(path: Path) -> None:
    """Create a folder and those above it, each one's entry safe on disk; an existing one is left alone."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder (what was created, renamed, removed) are safe on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Holds a folder, or a file that is made for it, among all processes of this machine; without `wait`, False where
    another one has it. The kernel lets go for a process that is killed."""
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o666)
    try:
        if wait:
            system.lock(descriptor)
            yield True
        else:
            yield system.try_lock(descriptor)
    finally:
        os.close(descriptor)
