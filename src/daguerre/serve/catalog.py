"""The runs of a folder, by ids that say nothing of their places: found, summed up, and looked at as they change."""

import os
import threading
import time
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from daguerre.checkpoint.run_dir import RunFolder
from daguerre.remote.copies import Copies
from daguerre.report.run import LIVE
from daguerre.serve import summaries
from daguerre.serve.bounds import check_run, within
from daguerre.serve.summaries import Summary

_DEPTH = 3
"""Folders below each other in which runs are looked for: `run_name` may have slashes."""

_AGAIN_SECONDS = 2.0


@dataclass
class Entry:
    """A run of the list."""

    id: str
    folder: Path
    stamp: summaries.Stamp | None = None
    summary: Summary | None = None


@dataclass
class Catalog:
    """The runs below a folder. Threads may call it."""

    folder: Path
    roots: tuple[Path, ...]
    """Folders outside of which nothing is read, their links followed; the first one is `folder`."""
    copies: Copies | None = None
    """Of runs in a store: then `folder` is theirs, and is kept up to date while somebody looks."""
    entries: dict[str, Entry] = field(default_factory=dict)
    _asked: float = -_AGAIN_SECONDS
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def name(self) -> str:
        """For people: that of the folder, or the address."""
        return self.copies.at.name if self.copies else self.folder.name or str(self.folder)

    def address(self, folder: Path) -> str:
        """The run of a folder, as commands name it."""
        far = self.copies and self.copies.far(folder)
        return far.run.url if far else str(folder)

    def problem(self, folder: Path | None = None) -> str:
        """The reason why the store, or a run in it, cannot be read now; empty if it can."""
        far = self.copies.far(folder) if self.copies and folder else None
        return far.problem if far else self.copies.problem if self.copies else ""

    def scan(self, everything: bool = True) -> None:
        """Looks at all runs, or at those that run."""
        if self.copies:
            self.copies.asked()
        with self._lock:
            if everything:
                found = {identity(path, self.folder): path for path in self._folders()}
                self.entries = {id: self.entries.get(id) or Entry(id, path) for id, path in found.items()}
            for entry in self.entries.values():
                if everything or (entry.summary is not None and entry.summary.state in LIVE):
                    self._look(entry)

    def refresh(self, id: str) -> None:
        """Looks at one run."""
        with self._lock:
            if id in self.entries:
                self._look(self.entries[id])

    def summed_up(self) -> list[Entry]:
        """All runs: those that run first, then the newest."""
        found = [entry for entry in list(self.entries.values()) if entry.summary is not None]
        return sorted(found, key=_order)

    def at(self, id: str) -> Path | None:
        """The folder of a run, if it holds nothing that leads outside; None for an id of no run.

        OutOfBounds for a run whose files a page must not read.
        """
        if self.copies:
            self.copies.asked()
        if id not in self.entries:
            with self._lock:  # whoever asks while another one looks waits for what is found
                if id not in self.entries and time.monotonic() > self._asked + _AGAIN_SECONDS:
                    self._asked = time.monotonic()
                    self.scan()  # the address of a run, opened before any list
        entry = self.entries.get(id)
        if entry is None:
            return None
        try:
            check_run(entry.folder, self.roots)
        except OSError:
            return None
        return entry.folder

    def _look(self, entry: Entry) -> None:
        now = summaries.stamp(entry.folder)
        if now != entry.stamp:
            entry.summary, entry.stamp = summaries.summary(entry.folder, self.roots), now

    def _folders(self) -> list[Path]:
        found: list[Path] = []
        waiting = [(self.folder, _DEPTH)]
        while waiting:
            folder, depth = waiting.pop()
            if is_run(folder):
                found.append(folder)
            elif depth:
                waiting += [(path, depth - 1) for path in self._below(folder)]
        return found

    def _below(self, folder: Path) -> list[Path]:
        try:
            with os.scandir(folder) as entries:
                return [
                    Path(entry.path)
                    for entry in entries
                    if not entry.name.startswith(".")
                    and entry.is_dir()
                    # A link is followed to a run, not to a folder of runs, where it might lead round.
                    and (not entry.is_symlink() or (is_run(Path(entry.path)) and within(Path(entry.path), self.roots)))
                ]
        except OSError:
            return []


class News:
    """News of the list for one reader, who has it as it is now."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._known: dict[str, Summary | None] = {}
        self.take()

    def take(self) -> dict[str, Entry | None]:
        """Runs of which the list says something new, by id, None for those that are gone; they are known then."""
        entries = {id: entry for id, entry in self.catalog.entries.items() if entry.summary is not None}
        before, self._known = self._known, {id: entry.summary for id, entry in entries.items()}
        return {id: entries.get(id) for id in before | entries if before.get(id) != self._known.get(id)}


def identity(folder: Path, above: Path) -> str:
    """The id of a run: by its place below the folder, so that it outlives the server."""
    return sha256(os.fsencode(os.path.relpath(folder, above))).hexdigest()[:12]


def is_run(folder: Path) -> bool:
    paths = RunFolder(folder)
    return paths.config.is_file() or paths.metrics.is_file()


def _order(entry: Entry) -> tuple[bool, float]:
    assert entry.summary is not None
    return entry.summary.state not in LIVE, -entry.summary.updated
