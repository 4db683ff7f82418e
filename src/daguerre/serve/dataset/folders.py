"""Folders of pictures below the roots, by ids that say nothing of their places."""

import os
import threading
import time
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from daguerre.data.folder.scan import EXTENSIONS
from daguerre.data.leftovers import is_leftover
from daguerre.errors import UserError
from daguerre.serve.bounds import within
from daguerre.serve.catalog import is_run

_DEPTH = 6
_MOST = 20_000
"""Folders that are looked at."""
_AGAIN_SECONDS = 2.0
_COVERS = 4


@dataclass
class Place:
    """A folder below a root."""

    id: str
    path: Path
    root: Path
    pictures: int = 0
    """Files in it that are called as pictures are."""
    below: int = 0
    """The same with those of the folders in it."""
    covers: list[str] = field(default_factory=list)
    """Paths of some of them."""

    def add(self, name: str) -> None:
        """Counts a file that is called as pictures are."""
        if name.lower().endswith(EXTENSIONS):
            self.pictures += 1
            if len(self.covers) < _COVERS:
                self.covers.append(name)

    @property
    def name(self) -> str:
        """Its place below the root, with the root's own name."""
        return os.path.join(self.root.name, os.path.relpath(self.path, self.root)).removesuffix("/.")


@dataclass
class Folders:
    """Those below the roots that are no runs. Threads may call it."""

    roots: tuple[Path, ...]
    _found: dict[str, Place] = field(default_factory=dict)
    _asked: float = -_AGAIN_SECONDS
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def listed(self) -> list[Place]:
        """Those with pictures in them or below them, by name; not the folder of the runs for what is below it."""
        found = [place for place in self._walk() if place.pictures or (place.below and place.path != self.roots[0])]
        return sorted(found, key=lambda place: place.name)

    def at(self, id: str) -> Place:
        """The folder of an id, which is there. UserError for an id of none."""
        if id not in self._found and time.monotonic() > self._asked + _AGAIN_SECONDS:
            self._walk()  # the address of a folder, opened before any list
        place = self._found.get(id)
        if place is None or not place.path.is_dir() or not within(place.path, self.roots):
            raise UserError("there is no such folder of pictures", code="missing")
        return place

    def added(self, path: Path, root: Path) -> Place:
        """A folder that was made."""
        place = Place(identity(path), path, root)
        with self._lock:  # a walk that began before does not know it
            self._found[place.id] = place
        return place

    def _walk(self) -> list[Place]:
        with self._lock:
            found: dict[str, Place] = {}
            for root in self.roots:
                self._below(root, root, _DEPTH, found)
            self._found, self._asked = found, time.monotonic()
            return [*found.values()]

    def _below(self, path: Path, root: Path, depth: int, found: dict[str, Place]) -> int:
        """Adds a folder and those in it; how many pictures there are."""
        id = identity(path)
        if id in found or len(found) >= _MOST or (is_run(path) and path != root):
            return 0
        place = found[id] = Place(id, path, root)
        inside = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if is_leftover(entry.name):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        inside.append(Path(entry.path))
                    else:
                        place.add(entry.name)
        except OSError:
            return 0
        place.below = place.pictures
        for each in sorted(inside) if depth else ():
            place.below += self._below(each, root, depth - 1, found)
            if not place.covers and (inner := found.get(identity(each))) is not None:
                place.covers = [os.path.join(each.name, name) for name in inner.covers]
        return place.below


def identity(path: Path) -> str:
    """The id of a folder, which outlives the server."""
    return sha256(os.fsencode(path)).hexdigest()[:12]
