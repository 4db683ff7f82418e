"""Images that stand in a parquet file as they are, in a few pieces: found once, read again without decoding anything.

Compression leaves encoded images alone: without it, with Snappy, and for larger ones with Zstandard, pages hold them
whole but for a few bytes between blocks of 64 or 128 KiB; what repeats, such as a header that many share, stands
elsewhere. So an image is found again by the places of its pieces, each compared when the file is indexed. One that is
not in the file like this has none, and is read through its row group.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from daguerre.storage import io as storage_io
from daguerre.storage.location import Location

PIECES = 24
"""Most pieces of an image."""
KEY_BYTES = 32
"""Bytes by which a piece is looked for."""
NEAR_BYTES = 256
"""How far behind the last piece the next one usually begins: headers of pages and blocks stand between."""
FAR_BYTES = 1 << 20
"""How far from there a piece is looked for at all."""
COPY_BYTES = 64
"""Longest stretch that may have been replaced by a reference to the same bytes before it."""
REACH_BYTES = 1 << 17
"""How far such a reference may point back, in the file."""
GAP_BYTES = 1 << 16
"""Bytes between pieces that are read with them rather than asking twice."""
Piece = tuple[int, int]
"""Offset in the file, and length."""


@dataclass
class Finder:
    """Looks for the images of one file, which stand there in their order."""

    file: mmap.mmap
    cursor: int = 0
    """Where the next image is expected."""
    missed_bytes: int = 0
    """Of images that were not found since."""
    start: int = 0
    """Where the last image begins: many have the same beginning."""

    def ranges(self, data: bytes) -> bytes:
        """The pieces of an image as pairs of uint64 (offset, length); nothing if it is not found."""
        found: list[Piece] = []
        position, cursor = 0, self.cursor
        while position < len(data) and len(found) < PIECES:
            pieces = self._next(data, position, cursor)
            if not pieces:
                break
            found.extend(pieces)
            position += sum(length for _, length in pieces)
            at, length = pieces[-1]
            if 0 <= at - cursor < FAR_BYTES + self.missed_bytes and (position > 1024 or at - cursor < NEAR_BYTES):
                cursor = at + length
        self.cursor = cursor
        if position < len(data):
            self.missed_bytes += len(data)
            return b""
        self.missed_bytes, self.start = 0, found[0][0]
        return np.array(found, dtype="<u8").tobytes()

    def _next(self, data: bytes, position: int, cursor: int) -> list[Piece]:
        """The pieces from `position` on; none where they are not found."""
        key = data[position : position + KEY_BYTES]
        near = self.file.find(key, cursor, cursor + NEAR_BYTES + len(key))
        if near >= 0:
            return [(near, self._alike(data, position, near))]
        if position == 0 and self.file[self.start : self.start + len(key)] == key:
            return [(self.start, self._alike(data, 0, self.start))]
        if position and (pieces := self._after_copy(data, position, cursor)):
            return pieces
        far = self.file.find(key, cursor, cursor + FAR_BYTES + self.missed_bytes)
        if far < 0:
            before = max(0, cursor - REACH_BYTES)
            far = before + at if (at := self.file[before:cursor].rfind(key)) >= 0 else -1
        return [(far, self._alike(data, position, far))] if far >= 0 else []

    def _after_copy(self, data: bytes, position: int, cursor: int) -> list[Piece]:
        """A short stretch that stands somewhere before, and what follows it here."""
        here, before = self.file[cursor : cursor + 2 * KEY_BYTES], max(0, cursor - REACH_BYTES)
        for skipped in range(1, COPY_BYTES + 1):
            key = data[position + skipped : position + skipped + KEY_BYTES]
            at = here.find(key)
            if at >= 0:
                copied = self.file[before:cursor].rfind(data[position : position + skipped])
                if copied < 0:
                    return []
                rest = [(cursor + at, self._alike(data, position + skipped, cursor + at))] if key else []
                return [(before + copied, skipped), *rest]
        return []

    def _alike(self, data: bytes, position: int, at: int) -> int:
        """The number of bytes that are the same."""
        length, block = 0, 1 << 14
        while position + length < len(data):
            ours = data[position + length : position + length + block]
            theirs = self.file[at + length : at + length + len(ours)]
            if ours != theirs:
                common = min(len(ours), len(theirs))
                unlike = np.frombuffer(ours, np.uint8, common) != np.frombuffer(theirs, np.uint8, common)
                return length + (int(unlike.argmax()) if unlike.any() else common)
            length += len(ours)
        return length


@contextmanager
def finder(path: Path) -> Iterator[Finder]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        yield Finder(mapped)


def read(file: Location, ranges: bytes) -> bytes:
    """The image whose pieces are there; whether they are still what they were is for a digest to say.

    `stores.Mismatch` where the file ends before.
    """
    pieces = np.frombuffer(ranges, dtype="<u8").reshape(-1, 2).tolist()
    first, end = min(at for at, _ in pieces), max(at + length for at, length in pieces)
    if end - first <= sum(length for _, length in pieces) + GAP_BYTES:
        data = storage_io.read(file, first, end - first)
        return b"".join(data[at - first : at - first + length] for at, length in pieces)
    return b"".join(storage_io.read(file, at, length) for at, length in pieces)
