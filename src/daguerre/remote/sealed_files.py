"""A set of files in an object store that is whole or absent: a checkpoint, an export.

    PREFIX/manifest.json            which files, with sizes and digests, and in which attempt's folder they are
    PREFIX/ATTEMPT/PATH             the files

Each attempt to save has a folder of its own, so that two of them never mix, whoever is killed, paused or late. The
manifest comes last, by a conditional write: it makes the bundle appear, or replaces the one before in one step.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

from daguerre.checkpoint import manifest
from daguerre.checkpoint.atomic import make_folder, write_bytes_atomically
from daguerre.checkpoint.manifest import CheckpointError, Damaged, Entry
from daguerre.storage.bucket import Listed, Prefix, Version
from daguerre.storage.errors import Missing


@dataclass(frozen=True)
class Sealed:
    """A bundle as its manifest has it."""

    data: bytes
    """The manifest."""
    version: Version
    folder: str
    """Of the attempt that wrote it."""
    entries: dict[str, Entry]
    tags: dict[str, str]
    """The store's entity tag of each file when it was written."""


class Conflict(CheckpointError):
    """Another process wrote the same bundle meanwhile."""


@dataclass(frozen=True)
class Bundle:
    """A bundle, there or not."""

    at: Prefix

    def attempt(self) -> str:
        """The name of a fresh folder."""
        return secrets.token_hex(8)

    def read(self) -> Sealed | None:
        """None where there is none. Damaged where its manifest differs from what was written."""
        try:
            data, version = self.at.read(manifest.NAME)
        except Missing:
            return None
        entries, stored = manifest.from_bytes(data, self.at.last)
        folder = stored.get("folder", "")
        if not folder.isalnum():
            raise Damaged(f"{self.at.last}/{manifest.NAME} does not say where its files are")
        return Sealed(data, version, folder, entries, dict(stored.get("tags", {})))

    def seal(self, attempt: str, entries: Mapping[str, Entry], tags: Mapping[str, str]) -> None:
        """Makes the files of an attempt, which all arrived, the bundle; the one before goes afterwards.

        Conflict if another process writes it at the same time.
        """
        data = manifest.to_bytes(entries, {"folder": attempt, "tags": dict(sorted(tags.items()))})
        before = self._version()
        done = self.at.create(manifest.NAME, data) if before is None else self.at.replace(manifest.NAME, data, before)
        if done is None:
            raise Conflict(
                f"another process wrote {self.at.name} at the same moment: only one run may work there. Stop the other"
            )
        if before is not None:
            self.clear(keep=attempt)

    def _version(self) -> Version | None:
        try:
            return self.at.read(manifest.NAME)[1]
        except Missing:
            return None

    def clear(self, keep: str) -> None:
        """Deletes the files of all other attempts."""
        gone = [one.name for one in self.at.listing() if one.name not in (manifest.NAME,)]
        self.at.delete([name for name in gone if not name.startswith(f"{keep}/")])

    def discard(self, attempt: str) -> None:
        """Deletes what an attempt wrote."""
        self.at.delete([f"{attempt}/{one.name}" for one in (self.at / attempt).listing()])

    def delete(self) -> None:
        """The manifest first, so that half a bundle never counts."""
        self.at.delete([manifest.NAME])
        self.at.delete([one.name for one in self.at.listing()])

    def unchanged(self, sealed: Sealed, listed: Mapping[str, Listed]) -> None:
        """Damaged unless the store still has the files; `listed` are the objects of the bundle by name.

        A file that the store calls by another tag than at first is read whole.
        """
        for path, entry in sealed.entries.items():
            found = listed.get(f"{sealed.folder}/{path}")
            if found is None:
                raise Damaged(f"{self.at.last}/{path} is missing")
            if found.bytes != entry.size_bytes:
                raise Damaged(f"{self.at.last}/{path} has {found.bytes} bytes, {entry.size_bytes} were saved")
            if (not found.tag or found.tag != sealed.tags.get(path)) and (
                self.at.digest(f"{sealed.folder}/{path}", entry.size_bytes) != entry.sha256
            ):
                raise Damaged(f"{self.at.last}/{path} is damaged: its digest is not the one that was saved")

    def bring(self, folder: Path, reader: str, number: int = 0) -> None:
        """`fetch` of what there is now, also where it is replaced meanwhile. Damaged where a file, or all, is missing.

        StoreError, OSError.
        """
        before = b""
        while True:
            sealed = self.read()
            if sealed is None:
                raise Damaged(f"{self.at.last}/{manifest.NAME} is missing")
            try:
                return self.fetch(sealed, folder, reader, number)
            except Missing as missing:
                if sealed.data == before:  # looked up once more: it is not just being replaced
                    raise Damaged(f"{missing.place.name} is missing") from missing
                before = sealed.data

    def fetch(self, sealed: Sealed, folder: Path, reader: str, number: int = 0) -> None:
        """Brings the bundle into a local folder, every file verified; Damaged names one that differs.

        Processes with the same `reader` may share the work: each file is fetched, or found there and read once, by the
        one that comes first. `number` says where this one begins. StoreError, OSError.
        """
        notes = folder.parent / ".fetched" / folder.name
        make_folder(folder)
        make_folder(notes)
        paths = sorted(sealed.entries, key=lambda path: (-sealed.entries[path].size_bytes, path))
        start = number % max(1, len(paths))
        order, busy = [*paths[start:], *paths[:start]], []
        for path in order:
            if not self._fetched(sealed, folder, notes, path, reader, wait=False):
                busy.append(path)
        for path in busy:
            self._fetched(sealed, folder, notes, path, reader, wait=True)
        if not _holds(folder / manifest.NAME, sealed.data):
            with _alone(notes / f".{manifest.NAME}", wait=True):
                write_bytes_atomically(folder / manifest.NAME, sealed.data)

    def _fetched(self, sealed: Sealed, folder: Path, notes: Path, path: str, reader: str, wait: bool) -> bool:
        """False where another process is at it."""
        entry, to, note = sealed.entries[path], folder / path, notes / path.replace("/", "%")
        with _alone(note, wait) as mine:
            if not mine:
                return False
            known = f"{reader} {entry.sha256}"
            if note.read_text(encoding="utf-8") == known and to.is_file():
                return True
            if not _holds_digest(to, entry):
                make_folder(to.parent)
                self.at.fetch(f"{sealed.folder}/{path}", to)
                if not _holds_digest(to, entry):
                    to.unlink()
                    raise Damaged(f"{self.at.last}/{path} is damaged: its sha256 is not the one that was saved")
            note.write_text(known, encoding="utf-8")
            return True


@contextmanager
def _alone(note: Path, wait: bool) -> Iterator[bool]:
    """Whether this process is the one that works at a file now; the kernel lets go for one that is killed."""
    descriptor = os.open(note, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def _holds(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data


def _holds_digest(path: Path, entry: Entry) -> bool:
    if not path.is_file() or path.stat().st_size != entry.size_bytes:
        return False
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest() == entry.sha256
