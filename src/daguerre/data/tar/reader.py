"""The table of a tar file: offsets of its regular members, and the byte ranges that could not be parsed.

Reads ustar, GNU and pax headers from memory (bytes or a memory map), never data. Strict: every header's checksum must
hold, the archive must end with its two blocks of zeros, and nothing that is wrong ends the walk in silence: it goes on
at the next header whose checksum holds, and the bytes in between are reported. What members mean is not known here.
"""

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

BLOCK = 512
Bytes = bytes | mmap.mmap
"""What can be sliced and searched."""

_ZEROS = bytes(BLOCK)
_RECORD_BYTES = 20 * BLOCK  # archives are filled up with zeros to a multiple of this
_EXTENSION_LIMIT = _PIECE_BYTES = 1 << 20  # a name that is longer is damage, or an attempt to fill the memory
_REGULAR = frozenset({b"0", b"\0", b"7"})
_EXTENSIONS = frozenset({b"L", b"K", b"x", b"X", b"g"})
_SPARSE = b"S"
_RECORDS = frozenset({b"path", b"size"})
_SPARSE_RECORD = b"GNU.sparse."
"""What of pax headers matters here: each of them could bring a hundred thousand records."""
_WITHOUT_DATA: Mapping[bytes, str] = {
    b"1": "hard link",
    b"2": "symbolic link",
    b"3": "device",
    b"4": "device",
    b"5": "folder",
    b"6": "pipe",
}
"""Members that are no files; their size field, if any, counts no bytes."""


class Member(NamedTuple):
    """A regular file of an archive."""

    name: str
    """As stored, in UTF-8; other bytes are escaped as the operating system's file names are (surrogates)."""
    start: int
    """Its first byte in the archive, headers included."""
    offset: int
    """Its first byte of data."""
    size: int
    """Bytes of data."""


@dataclass(frozen=True)
class Contents:
    """The whole archive."""

    members: tuple[Member, ...]
    others: Mapping[str, tuple[str, ...]]
    """Names of what is not a regular file, by kind."""
    damage: tuple[tuple[int, int], ...]
    """Byte ranges [start, end) in which any number of members may have been; start = end: it is cut off there."""


def contents(data: Bytes) -> Contents:
    """Walks over all headers of an archive. Raises nothing, whatever the bytes are."""
    walk = _Walk(data)
    at = 0
    while at < len(data):
        at = walk.zeros(at) if data[at : at + BLOCK] == _ZEROS else walk.entry(at)
    if not walk.ended and (not walk.damage or walk.damage[-1][1] < len(data)):
        walk.damage.append((len(data), len(data)))
    return Contents(tuple(walk.members), {kind: tuple(names) for kind, names in walk.others.items()}, walk.ranges())


def begins(data: Bytes) -> bool:
    """Says whether the first header is one of a tar."""
    return _header(data[:BLOCK]) is not None


class _Header(NamedTuple):
    name: bytes
    size: int
    kind: bytes


class _Damaged(Exception):
    """There is no header whose checksum holds at this byte, or what it announces is not there."""

    def __init__(self, at: int) -> None:
        self.at = at


@dataclass
class _Walk:
    """A walk over the headers, with all that was found so far."""

    data: Bytes
    members: list[Member] = field(default_factory=list)
    others: dict[str, list[str]] = field(default_factory=dict)
    damage: list[tuple[int, int]] = field(default_factory=list)
    everywhere: dict[bytes, bytes] = field(default_factory=dict)
    """Records of pax's global headers."""
    ended: bool = False

    def entry(self, start: int) -> int:
        """Takes in the member whose headers start at `start`; where the next one should."""
        try:
            return self._entry(start)
        except _Damaged as damaged:
            return self._onward(start, damaged.at)

    def zeros(self, start: int) -> int:
        """The end of the archive; or zeros in its middle, after which something comes.

        More zeros at the end than the last record can hold are a file that was never filled.
        """
        if _zeros_end(self.data, start) == len(self.data):
            length = len(self.data) - start
            self.ended = length >= 2 * BLOCK
            if length > 2 * BLOCK + _RECORD_BYTES:
                self.damage.append((start, len(self.data)))
            return len(self.data)
        return self._onward(start, start)

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The damage in order, with neighbours joined."""
        joined: list[tuple[int, int]] = []
        for start, end in sorted(self.damage):
            if joined and start <= joined[-1][1] and start < end:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((start, end))
        return tuple(joined)

    def _entry(self, start: int) -> int:
        header, offset, records = self._headers(start)
        size = _pax_size(records, header.size)
        if size is None:
            raise _Damaged(offset)
        if header.kind == _SPARSE:
            offset = self._after_sparse_map(offset)
        name = records.get(b"path", header.name).decode("utf-8", "surrogateescape")
        other = _other(header.kind, name, records)
        size = 0 if header.kind in _WITHOUT_DATA else size
        if offset + size > len(self.data):
            raise _Damaged(offset)
        if other is None:
            self.members.append(Member(name, start, offset, size))
        else:
            self.others.setdefault(other, []).append(name)
        return min(offset + _padded(size), len(self.data))

    def _headers(self, start: int) -> tuple[_Header, int, dict[bytes, bytes]]:
        """A member's own header, the byte after it, and what the headers before it say of the member."""
        records: dict[bytes, bytes] = {}
        at = start
        while True:
            header = _header(self.data[at : at + BLOCK])
            if header is None:
                raise _Damaged(at)
            body = at + BLOCK
            if header.kind not in _EXTENSIONS:
                return header, body, {**self.everywhere, **records} if self.everywhere else records
            if header.size > _EXTENSION_LIMIT or body + header.size > len(self.data):
                raise _Damaged(body)
            said = self.data[body : body + header.size]
            if header.kind == b"L":
                records[b"path"] = said.partition(b"\0")[0]
            elif header.kind != b"K":
                if (found := _pax_records(said)) is None:
                    raise _Damaged(body + _padded(header.size) + BLOCK)  # nor is the header after it what it says
                (self.everywhere if header.kind == b"g" else records).update(found)
            at = body + _padded(header.size)

    def _after_sparse_map(self, at: int) -> int:
        """Old GNU sparse files: more blocks of the map follow the header while a flag says so."""
        flag = at - BLOCK + 482
        while flag < len(self.data) and self.data[flag] == 1:
            flag, at = at + 504, at + BLOCK
        return at

    def _onward(self, start: int, at: int) -> int:
        """The next header after damage; the bytes from `start` to there are reported.

        A header inside the member before says that bytes are missing there: then that member is damaged too.
        """
        before = self.members[-1] if self.members else None
        if before and before.offset + _padded(before.size) == start:
            inside = _next_header(self.data, before.offset, start)
            padding = self.data[before.offset + before.size : start]
            if inside is not None or padding.strip(b"\0"):
                self.members.pop()
                start, at = before.start, before.offset
        found = _next_header(self.data, at, len(self.data))
        self.damage.append((start, len(self.data) if found is None else found))
        return self.damage[-1][1]


def _other(kind: bytes, name: str, records: Mapping[bytes, bytes]) -> str | None:
    """The kind of a member that is no regular file as a whole in one piece; None for one that is."""
    if kind == b"0" and not records:
        return None
    if kind in _WITHOUT_DATA:
        return _WITHOUT_DATA[kind]
    if kind == _SPARSE or _SPARSE_RECORD in records:
        return "sparse file"
    if kind == b"\0" and name.endswith("/"):
        return "folder"
    return None if kind in _REGULAR else "member of an unknown kind"


def _header(block: bytes) -> _Header | None:
    """The fields of a header; None where its checksum does not hold."""
    if len(block) < BLOCK:
        return None
    total, size = _number(block[148:156]), _number(block[124:136])
    if total is None or size is None:
        return None
    if total != sum(block) - sum(block[148:156]) + 8 * 32 and total != _signed_checksum(block):
        return None
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0" and block[345]:
        name = block[345:500].partition(b"\0")[0] + b"/" + name
    return _Header(name, size, block[156:157])


def _signed_checksum(block: bytes) -> int:
    """The sum of all bytes as old programs made it, which took bytes as signed; those of the checksum are spaces."""
    rest = block[:148] + block[156:]
    return sum(rest) - 256 * sum(byte > 127 for byte in rest) + 8 * 32


def _number(text: bytes) -> int | None:
    """An octal number, or GNU's binary one for what does not fit; None for neither, or below 0."""
    if text[0] & 0x80:
        return int.from_bytes(text, "big") & ((1 << (8 * len(text) - 1)) - 1) if text[0] == 0x80 else None
    digits = text.partition(b"\0")[0].strip(b" ")
    try:
        return int(digits, 8) if digits.isdigit() else None if digits else 0
    except ValueError:  # 8 or 9
        return None


def _pax_records(said: bytes) -> dict[bytes, bytes] | None:
    """`LENGTH KEY=VALUE\\n` one after the other; None where it is not so."""
    records: dict[bytes, bytes] = {}
    at, end = 0, len(said.rstrip(b"\0"))
    while at < end:
        length = said[at : at + 8].partition(b" ")[0]
        size = int(length) if length.isdigit() and len(length) < 8 else 0
        key, equals, value = said[at + len(length) + 1 : at + size].partition(b"=")
        if not equals or not value.endswith(b"\n"):
            return None
        if key in _RECORDS:
            records[key] = value[:-1]
        elif key.startswith(_SPARSE_RECORD):
            records[_SPARSE_RECORD] = b""
        at += size
    return records


def _pax_size(records: Mapping[bytes, bytes], size: int) -> int | None:
    """The size that pax gives instead of the header's; None where it is no number."""
    said = records.get(b"size", b"%d" % size)
    return int(said) if said.isdigit() and len(said) < 20 else None


def _padded(size: int) -> int:
    """A number of bytes rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def _zeros_end(data: Bytes, start: int) -> int:
    """The first byte from `start` on that is not zero."""
    for at in range(start, len(data), _PIECE_BYTES):
        piece = data[at : at + _PIECE_BYTES]
        if rest := piece.lstrip(b"\0"):
            return at + len(piece) - len(rest)
    return len(data)


def _next_header(data: Bytes, start: int, stop: int) -> int | None:
    """The first header in [start, stop) whose checksum holds: at a multiple of a block, or anywhere by its magic."""
    aligned = next(_aligned_headers(data, _padded(start), stop), None)
    last = stop if aligned is None else aligned
    at = start + 257
    while (at := data.find(b"ustar", at, last + 257)) >= 0:
        if _header(data[at - 257 : at - 257 + BLOCK]) is not None:
            return at - 257
        at += 1
    return aligned


def _aligned_headers(data: Bytes, start: int, stop: int) -> Iterator[int]:
    """Headers at multiples of a block. Most blocks are recognized by their checksum field alone, many at once."""
    first, length = start, 16 * BLOCK  # what is looked for is mostly near
    while first < stop:
        piece = data[first : min(first + length, stop)]
        blocks = np.frombuffer(piece, np.uint8, len(piece) // BLOCK * BLOCK).reshape(-1, BLOCK)
        digits = blocks[:, 148:156]
        octal = ((digits & 0xF8) == ord("0")) | (digits == ord(" ")) | (digits == 0)
        likely = octal.all(axis=1) & digits.any(axis=1) & (blocks[:, 0] != 0)
        for number in np.flatnonzero(likely).tolist():
            if _header(piece[number * BLOCK : (number + 1) * BLOCK]) is not None:
                yield first + number * BLOCK
        first, length = first + length, min(2 * length, _PIECE_BYTES)
