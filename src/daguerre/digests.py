"""Digests of files."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import xxhash

_PIECE_BYTES = 1 << 24


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


def sha256(files: Sequence[Path]) -> str:
    """SHA-256 of files, one after the other, hex. OSError."""
    return _of(files, hashlib.sha256())


def xxh3_128(file: Path) -> str:
    """xxh3_128 of a file, hex. OSError."""
    return _of([file], xxhash.xxh3_128())


def _of(files: Sequence[Path], digest: _Hash) -> str:
    for path in files:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()
