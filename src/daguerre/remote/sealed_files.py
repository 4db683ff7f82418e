"""A set of files in an object store that is whole or absent: a checkpoint, an export.

    PREFIX/manifest.json            which files, with sizes and digests, and in which attempt's folder they are
    PREFIX/ATTEMPT/PATH             the files

Each attempt to save has a folder of its own, so that two of them never mix, whoever is killed, paused or late. The
manifest comes last, by a conditional write: it makes the set appear, or replaces the one before in one step.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

from daguerre.checkpoint import manifest
from daguerre.checkpoint.atomic import locked, make_folder, write_bytes_atomically
from daguerre.checkpoint.manifest import CheckpointError, Damaged, Entry, Kind
from daguerre.storage.bucket import Listed, Prefix, Version
from daguerre.storage.errors import Missing, StoreError


@dataclass(frozen=True)
class Contents:
    """A set as its manifest has it."""

    data: bytes
    """The manifest."""
    version: Version
    folder: str
    """Of the attempt that wrote it."""
    entries: dict[str, Entry]
    tags: dict[str, str]
    """The store's entity tag of each file when it was written."""


class Conflict(CheckpointError):
    """Another process wrote the same set meanwhile."""

    code = "in_use"


@dataclass(frozen=True)
class SealedFiles:
    """A set of files, there or not."""

    at: Prefix

    def read(self) -> Contents | None:
        """None without a file. Damaged where its manifest differs from what was written."""
        try:
            data, version = self.at.read(manifest.NAME)
        except Missing:
            return None
        entries, stored = manifest.from_bytes(data, self.at.last)
        folder = stored.get("folder", "")
        if not folder.isalnum():
            raise Damaged(f"{self.at.last}/{manifest.NAME} does not list where its files are")
        return Contents(data, version, folder, entries, dict(stored.get("tags", {})))

    def _present(self) -> Contents:
        if (there := self.read()) is None:
            raise Damaged(f"{self.at.last}/{manifest.NAME} is missing")
        return there

    def verify(self, listed: Mapping[str, Listed]) -> None:
        """Damaged unless the store still has every file as it was sent; `listed` are the objects of the set by name.

        A file that the store calls by another tag than at first is read whole.
        """
        there = self._present()
        for path, entry in there.entries.items():
            found = listed.get(f"{there.folder}/{path}")
            if found is None:
                raise Damaged(f"{self.at.last}/{path} is missing")
            if found.bytes != entry.size_bytes:
                raise Damaged(f"{self.at.last}/{path} has {found.bytes} bytes, {entry.size_bytes} were saved")
            if (not found.tag or found.tag != there.tags.get(path)) and (
                self.at.digest(f"{there.folder}/{path}", entry.size_bytes) != entry.sha256
            ):
                raise Damaged(f"{self.at.last}/{path} is damaged: its digest is not the one that was saved")

    def fetch_newest(self, folder: Path, reader: str, start: int = 0) -> None:
        """`fetch` of what there is now, also where it is replaced meanwhile. Damaged where a file, or all, is missing.

        StoreError, OSError.
        """
        before = b""
        while True:
            there = self._present()
            try:
                return self.fetch(there, folder, reader, start)
            except Missing as missing:
                if there.data == before:  # looked up once more: it is not just being replaced
                    raise Damaged(f"{missing.location.name} is missing") from missing
                before = there.data

    def fetch(self, there: Contents, folder: Path, reader: str, start: int = 0) -> None:
        """Fetches the set into a local folder, every file verified; Damaged names one that differs.

        Processes with the same `reader` may share the work: each file is fetched, or found there and read once, by the
        one that comes first. `start` is the place among the files where this one begins. StoreError, OSError.
        """
        notes = folder.parent / ".fetched" / folder.name
        make_folder(folder)
        make_folder(notes)
        paths = sorted(there.entries, key=lambda path: (-there.entries[path].size_bytes, path))
        start %= max(1, len(paths))
        order = [*paths[start:], *paths[:start]]
        busy = [path for path in order if not self._fetched(there, folder, notes, path, reader, wait=False)]
        for path in busy:
            self._fetched(there, folder, notes, path, reader, wait=True)
        sealed = folder / manifest.NAME
        if not (sealed.is_file() and sealed.read_bytes() == there.data):
            with locked(notes / f".{manifest.NAME}"):
                write_bytes_atomically(sealed, there.data)

    def _fetched(self, there: Contents, folder: Path, notes: Path, path: str, reader: str, wait: bool) -> bool:
        """False where another process is at it."""
        entry, to, note = there.entries[path], folder / path, notes / path.replace("/", "%")
        with locked(note, wait) as held:
            if not held:
                return False
            known = f"{reader} {entry.sha256}"
            if note.read_text(encoding="utf-8") == known and to.is_file():
                return True
            if not _holds_digest(to, entry):
                make_folder(to.parent)
                self.at.fetch(f"{there.folder}/{path}", to)
                if not _holds_digest(to, entry):
                    to.unlink()
                    raise Damaged(f"{self.at.last}/{path} is damaged: its sha256 is not the one that was saved")
            note.write_text(known, encoding="utf-8")
            return True


class Upload:
    """An attempt to write a set: its files first, then the manifest."""

    def __init__(self, to: SealedFiles, attempt: str) -> None:
        """`attempt`: the name of its folder, which nobody has used before."""
        self._at, self._attempt = to.at, attempt
        self.entries: dict[str, Entry] = {}
        """The files that arrived."""
        self.tags: dict[str, str] = {}

    def send(self, path: str, kind: Kind, chunks: Callable[[], Iterable[Any]], about_bytes: int = 0) -> None:
        """Sends a file, of pieces that `chunks` makes again for each try. StoreError, OSError."""
        sent = self._at.send(f"{self._attempt}/{path}", chunks, about_bytes)
        self.entries[path], self.tags[path] = Entry(kind, sent.size_bytes, sent.sha256), sent.tag

    def seal(self) -> None:
        """Makes the files, which all arrived, the set; those of all other attempts go afterwards.

        Conflict if another process writes it at the same time.
        """
        data = manifest.to_bytes(self.entries, {"folder": self._attempt, "tags": dict(sorted(self.tags.items()))})
        try:
            before = self._at.read(manifest.NAME)[1]
        except Missing:
            before = None
        done = self._at.create(manifest.NAME, data) if before is None else self._at.replace(manifest.NAME, data, before)
        if done is None:
            raise Conflict(
                f"another process wrote {self._at.name} at the same time: only one run can use this folder. Stop the "
                "other one"
            )
        if before is not None:
            self.clear()

    def clear(self) -> None:
        """Deletes the files of all other attempts."""
        gone = [one.name for one in self._at.listing() if one.name != manifest.NAME]
        self._at.delete([name for name in gone if not name.startswith(f"{self._attempt}/")])

    def abort(self) -> None:
        """Deletes what was sent, if the store allows that; else the next start does."""
        with suppress(StoreError):
            self._at.delete([f"{self._attempt}/{one.name}" for one in (self._at / self._attempt).listing()])


def _holds_digest(path: Path, entry: Entry) -> bool:
    if not path.is_file() or path.stat().st_size != entry.size_bytes:
        return False
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest() == entry.sha256
