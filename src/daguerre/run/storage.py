"""The place of a run: a folder of this machine, or one in an object store with a working folder here. No torch here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from daguerre.checkpoint.actions import Inbox
from daguerre.checkpoint.run_dir import RunFolder, check_not_held, lock_holder
from daguerre.remote.run import RemoteStorage
from daguerre.storage import address, bucket


@dataclass
class LocalStorage:
    """A run in a folder that all ranks see."""

    folder: RunFolder
    say: Callable[[str], None] = print
    """Shows a message; a local folder has none."""

    @property
    def name(self) -> str:
        return str(self.folder.path)

    def check_not_held(self) -> None:
        """RunFolderHeld, naming the process, if one works there."""
        check_not_held(self.folder.path)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keeps every other process out within the context; rank 0 alone. RunFolderHeld, RunFolderError."""
        with self.folder.hold():
            yield

    def inbox(self) -> Inbox:
        """The actions that are asked of this process; where it is held, on rank 0."""
        holder = lock_holder(self.folder.path)
        assert holder is not None
        return Inbox(self.folder, holder, self.say)

    def abandon(self) -> None:
        """Lets go of the run, in a process that ends at once: of a folder the kernel does it."""


RunStorage = LocalStorage | RemoteStorage


def of(output_dir: str, run_name: str) -> RunStorage:
    """The storage of a run; nothing is created or read. UserError for an address that cannot be one.

    `hold()` on rank 0 alone; other ranks must not read `folder`: on another machine it is not there.
    """
    if address.is_remote(output_dir):
        return RemoteStorage(bucket.prefix(output_dir) / run_name)
    return LocalStorage(RunFolder(Path(output_dir) / run_name))
