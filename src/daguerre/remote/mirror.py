"""The files of a run's working folder in an object store: brought here at the start, sent there as they change.

Training never waits for it: a thread looks for changed files at intervals; a fault is reported once, and tried again.
What a checkpoint needs besides its tensors (metrics, config) is sent before the checkpoint counts: `flush`. The export
is replaced whole (remote/sealed_files.py). Checkpoints and the lock are not here.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import file_digest
from pathlib import Path

from daguerre import threads
from daguerre.checkpoint.run_dir import EXPORTS, RunFolder, RunFolderError
from daguerre.errors import UserError
from daguerre.remote import export
from daguerre.remote.errors import explained
from daguerre.storage.bucket import Listed, Prefix

EVERY_SECONDS = 10.0
"""Between two looks for changed files."""
_BYTES_A_SECOND = 1 << 20
"""A file that grows and grows is sent again no more often than this allows."""
_AT_ONCE = 8
_ELSEWHERE = ("checkpoints", *EXPORTS, "generated", "actions")
_FIRST, _LAST = ("config.yaml",), ("data.json", "status.json", "report.html")
"""Order of sending: what others are read by comes first, what says that they are there comes last."""

Stamp = tuple[int, int, int]


@dataclass
class Mirror:
    """A working folder and the place in a store that it is kept equal to."""

    run: Prefix
    folder: RunFolder
    say: Callable[[str], None]
    """Tells a person."""
    _sent: dict[str, tuple[Stamp, float]] = field(default_factory=dict, init=False, repr=False)
    """State of each file when it was sent, and the time."""
    _sending: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _failing: bool = field(default=False, init=False, repr=False)

    def pull(self) -> None:
        """Makes the working folder what the store has: of a run that went on elsewhere, or none. StoreError."""
        path = self.folder.path
        files = listed_files(self.run)
        forget_others(path, files)
        for name in EXPORTS:
            shutil.rmtree(path / name, ignore_errors=True)
        pull(self.run, path, files)
        self._sent = {one.name: (_stamp(path / one.name), time.monotonic()) for one in files}

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Sends changes while the block runs, and the last ones at its end: RunFolderError if they cannot be."""
        done = False
        try:
            with threads.background("run-mirror", self._watch):
                yield
                done = True
        finally:
            with nullcontext() if done else suppress(RunFolderError):  # the first error is the one to show
                self._finish()

    def flush(self) -> None:
        """Sends what a checkpoint needs besides its tensors, now. StoreError, OSError."""
        with self._sending:
            self._send_files(patient=False)

    def send_status(self) -> None:
        """Sends the status alone. StoreError, OSError."""
        self.run.write(self.folder.status.name, self.folder.status.read_bytes())

    def _finish(self) -> None:
        try:
            self._push(patient=False)
        except (OSError, UserError) as error:
            text = (
                f"the last files of the run could not be sent to {self.run.name}: {explained(error)}. They are in "
                f"{self.folder.path}; run the same command again to write them from the last checkpoint"
            )
            self.say(text)
            raise RunFolderError(text) from error

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(EVERY_SECONDS):
            try:
                self._push(patient=True)
            except (OSError, UserError) as error:
                if not self._failing:
                    self.say(
                        f"the run's files cannot be sent to {self.run.name} now: {explained(error)}. Training "
                        f"continues, with another try every {EVERY_SECONDS:.0f} s"
                    )
                self._failing = True
            else:
                if self._failing:
                    self.say(f"the run's files are sent to {self.run.name} again")
                self._failing = False

    def _push(self, patient: bool) -> None:
        # As they are now: they speak of what is sent before them.
        there = [path for name in _LAST if (path := self.folder.path / name).is_file()]
        last = [(path.name, _stamp(path), path.read_bytes()) for path in there]
        with self._sending:
            self._send_files(patient)
        for name in EXPORTS:
            self._send_export(self.folder.path / name)
        with self._sending:
            for name, stamp, data in last:
                self._send(name, stamp, partial(bytes, data))

    def _send_files(self, patient: bool) -> None:
        for name in sorted(_names(self.folder.path), key=lambda name: (name not in _FIRST, name)):
            path = self.folder.path / name
            with suppress(FileNotFoundError):  # written anew at this moment, or taken away
                stamp = _stamp(path)
                at = self._sent.get(name, (None, -1e9))[1]
                if name not in _LAST and not (patient and time.monotonic() - at < stamp[0] / _BYTES_A_SECOND):
                    self._send(name, stamp, path.read_bytes)

    def _send(self, name: str, stamp: Stamp, data: Callable[[], bytes]) -> None:
        if self._sent.get(name, (None, 0.0))[0] != stamp:
            self.run.write(name, data())
            self._sent[name] = (stamp, time.monotonic())

    def _send_export(self, folder: Path) -> None:
        """A folder that was put in its place whole; it is another one if its inode is."""
        if not folder.is_dir():
            return
        stamp = _stamp(folder)
        if self._sent.get(folder.name, (None, 0.0))[0] != stamp and export.send(
            self.run, folder, lambda: folder.is_dir() and _stamp(folder) == stamp
        ):
            self._sent[folder.name] = (stamp, time.monotonic())


def pull(run: Prefix, folder: Path, files: list[Listed]) -> None:
    """Brings files to a local folder, those that differ. StoreError, OSError."""

    def one(file: Listed) -> None:
        to = folder / file.name
        if not _equal(to, file):
            to.parent.mkdir(parents=True, exist_ok=True)
            run.fetch(file.name, to)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="pull") as threads:
        list(threads.map(one, files))


def forget_others(folder: Path, files: list[Listed]) -> None:
    """Removes files of a working folder or a copy that the store does not have."""
    there = {one.name for one in files}
    for name in list(_names(folder)):
        if name not in there:
            (folder / name).unlink()


def listed_files(run: Prefix) -> list[Listed]:
    """The files of a run that are mirrored one by one."""
    return [one for one in run.listing() if is_file(one.name)]


def _equal(path: Path, file: Listed) -> bool:
    if not path.is_file() or path.stat().st_size != file.bytes:
        return False
    with path.open("rb") as opened:
        return file_digest(opened, "md5").hexdigest() == file.tag.strip('"')


def is_file(name: str) -> bool:
    parts = name.split("/")
    return parts[0] not in _ELSEWHERE and not any(part in ("", "..") or part.startswith(".") for part in parts)


def _names(folder: Path) -> Iterator[str]:
    """Files of a working folder that belong into the store; temporary ones begin with a dot."""
    for above, folders, files in os.walk(folder):
        inside = Path(above).relative_to(folder)
        folders[:] = [one for one in folders if not one.startswith(".") and (inside / one).as_posix() not in _ELSEWHERE]
        yield from ((inside / one).as_posix() for one in files if not one.startswith("."))


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino
