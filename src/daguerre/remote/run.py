"""A run that lives in an object store, as the process that trains it sees it: a working folder of this machine, kept
equal to the store, and the lock that keeps others out."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from daguerre import user_cache
from daguerre.checkpoint.actions import Inbox
from daguerre.checkpoint.atomic import write_json_atomically
from daguerre.checkpoint.manifest import CheckpointError
from daguerre.checkpoint.run_dir import RunFolder, RunFolderError
from daguerre.remote import actions, lock
from daguerre.remote.errors import explained
from daguerre.remote.lock import Lock
from daguerre.remote.mirror import Mirror
from daguerre.storage.bucket import Prefix
from daguerre.storage.errors import StoreError

_LEAVING_SECONDS = 3.0
WORKS_FOR = ".works-for.json"
"""In a working folder: the address of its run."""


@dataclass
class RemoteStorage:
    """A run at `s3://` or `gs://`."""

    run: Prefix
    say: Callable[[str], None] = print
    """Tells a person; threads call it."""
    _lock: Lock | None = field(default=None, init=False, repr=False)
    _mirror: Mirror | None = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def folder(self) -> RunFolder:
        """The working folder, to read and write on this machine."""
        return RunFolder(working_folder(self.run))

    def check_not_held(self) -> None:
        """RunFolderHeld, naming the process, if one works there. RunFolderError."""
        with _explained(self.run):
            lock.check_not_held(self.run)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keeps every other process out while the block runs, and the store equal to the working folder.

        RunFolderHeld, RunFolderError.
        """
        with self.folder.hold():
            write_json_atomically(self.folder.path / WORKS_FOR, {"url": self.run.url})
            self._lock = Lock(self.run, lambda text: self.say(text))
            with _explained(self.run):
                holding = self._lock.held()
                holding.__enter__()
            try:
                self._mirror = Mirror(self.run, self.folder, lambda text: self.say(text))
                with _explained(self.run):
                    self._mirror.pull()
                with self._mirror.sending(), actions.fetching(self.run, self.folder, lambda text: self.say(text)):
                    yield
            finally:
                holding.__exit__(None, None, None)

    def inbox(self) -> Inbox:
        """The actions that are asked of this process; where it is held, on rank 0."""
        assert self._lock is not None
        return Inbox(self.folder, self._lock.own, self.say)

    def abandon(self) -> None:
        """For a process that ends at once, as its group is lost: sends the status and lets go, if that is quick."""

        def leave() -> None:
            with suppress(OSError):
                if self._mirror is not None:
                    self._mirror.send_status()
                if self._lock is not None:
                    self._lock.release()

        thread = threading.Thread(target=leave, name="run-abandon", daemon=True)
        thread.start()
        thread.join(_LEAVING_SECONDS)

    def before_commit(self) -> None:
        """Sends what a checkpoint needs besides its tensors, and makes sure that the run is still ours; where it is
        held, on rank 0. CheckpointError, RunFolderHeld."""
        try:
            if self._mirror is not None:
                self._mirror.flush()
            if self._lock is not None:
                self._lock.confirm()
        except OSError as error:
            raise CheckpointError(f"the run's files cannot be sent to {self.name}: {explained(error)}") from error


def working_folder(run: Prefix, kind: str = "runs") -> Path:
    """The folder of this machine for the files of a remote run."""
    return user_cache.folder() / kind / sha256(run.url.encode()).hexdigest()[:16] / run.last


@contextmanager
def _explained(run: Prefix) -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise RunFolderError(f"output_dir: {error.explanation}") from error
    except OSError as error:
        raise RunFolderError(
            f"cannot write to {error.filename}: {error.strerror}. The files of {run.name} are stored there during "
            "training; XDG_CACHE_HOME changes the folder"
        ) from error
