"""A metrics file that is followed: read on from the last byte that was read, and from its start where it was replaced,
as a resumed run does. What was read can be kept in a file and taken up again."""

import io
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from daguerre import documents, regular
from daguerre.checkpoint.atomic import write_bytes_atomically
from daguerre.errors import UserError
from daguerre.tracking.curves import Curve, Curves
from daguerre.tracking.running_mean import RunningMean
from daguerre.tracking.sinks import parse_line

_CHUNK_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 16 << 20
_MARK_BYTES = 256
"""Bytes before the place up to which a file was read, by which it is known to be the same file still."""
_VERSION = 1
_PLAIN = ("finite", "step", "samples", "first_time", "last_time", "training_seconds", "trained_to")


@dataclass
class Place:
    """Place up to which a file was read, and marks by which it is known again."""

    inode: int = -1
    offset: int = 0
    mark: str = ""
    """Digest of the bytes before `offset`."""
    lines: int = 0


@dataclass
class Followed:
    """The curves of a metrics file."""

    path: Path
    curves: Curves = field(default_factory=Curves)
    place: Place = field(default_factory=Place)
    size_bytes: int = 0
    """Size of the file when it was last looked at."""
    generation: int = 0
    """Counts the times that the file was read from its start."""

    def read(self) -> Iterator[None]:
        """Reads what was written since the last time, in steps of a megabyte, between which others may work.

        A torn last line waits until it is whole; a missing file is an empty one. OSError; UserError names a line that
        is no metrics.
        """
        try:
            regular.check_regular(self.path)
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            stat = os.fstat(file.fileno())
            self.size_bytes = stat.st_size
            if not self._is_same(file, stat):
                self.curves, self.place = Curves(), Place(stat.st_ino)
                self.generation += 1
            file.seek(self.place.offset)
            left = b""
            while chunk := file.read(_CHUNK_BYTES):
                *lines, left = (left + chunk).split(b"\n")
                if len(left) > _LONGEST_LINE_BYTES:
                    raise UserError(
                        f"{self.path}: a line of more than {len(left):,} bytes is no metrics", code="damaged"
                    )
                first = self.place.lines + 1
                self.curves.take([parse_line(line, self.path, number) for number, line in enumerate(lines, first)])
                self.place.lines += len(lines)
                self.place.offset += sum(len(line) + 1 for line in lines)
                self.place.mark = _mark(file, self.place.offset)
                yield

    def _is_same(self, file: io.BufferedReader, stat: os.stat_result) -> bool:
        place = self.place
        return (
            stat.st_ino == place.inode
            and stat.st_size >= place.offset
            and (place.offset == 0 or _mark(file, place.offset) == place.mark)
        )

    def dump(self, path: Path) -> None:
        """Writes what was read into a file, for `take_up`. OSError."""
        found = self.curves
        about = {
            "version": _VERSION,
            "widths": {name: curve.width for name, curve in found.curves.items()},
            "newest": {name: [step, str(value)] for name, (step, value) in found.newest.items()},
            "loss": found.loss.state,
            "place": asdict(self.place),
            **{name: getattr(found, name) for name in _PLAIN},
        }
        # By number: names of metrics are free, those of members of a zip file are not.
        arrays = {f"columns{i}": curve.columns for i, curve in enumerate(found.curves.values())}
        arrays |= {f"tail{i}": curve.tail for i, curve in enumerate(found.curves.values())}
        stream = io.BytesIO()
        np.savez(stream, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
        write_bytes_atomically(path, stream.getvalue())

    def take_up(self, path: Path) -> None:
        """Goes on from what `dump` wrote, if it is of this version and whole."""
        found = Curves()
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                about = documents.parse(arrays["about"].tobytes())
                if about["version"] != _VERSION:
                    return
                for i, (name, width) in enumerate(about["widths"].items()):
                    found.curves[name] = Curve(width, arrays[f"columns{i}"], arrays[f"tail{i}"])
            found.newest = {name: (step, float(value)) for name, (step, value) in about["newest"].items()}
            found.loss, place = RunningMean(state=about["loss"]), Place(**about["place"])
            for name in _PLAIN:
                setattr(found, name, about[name])
        except (*documents.MISREAD, EOFError, BadZipFile):
            return
        self.curves, self.place = found, place


def read_curves(path: Path) -> Curves:
    """The curves of a whole file. OSError; UserError for a line that is no metrics."""
    followed = Followed(path)
    for _ in followed.read():
        pass
    return followed.curves


def _mark(file: io.BufferedReader, offset: int) -> str:
    """The digest of the bytes before a place of a file, whose position stays."""
    start = max(0, offset - _MARK_BYTES)
    return sha256(os.pread(file.fileno(), offset - start, start)).hexdigest()
