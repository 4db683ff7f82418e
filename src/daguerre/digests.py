"""Digests of files and tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import xxhash

from daguerre.regular import check_regular

if TYPE_CHECKING:
    from torch import Tensor

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


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors, by name, hex."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return whole.hexdigest()


def _of(files: Sequence[Path], digest: _Hash) -> str:
    for path in files:
        check_regular(path)
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()
