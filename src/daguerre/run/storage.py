"""Where a run lives: a folder of this machine, or a place in an object store with a working folder here. No torch here:
its checkpoints are run/stores.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from daguerre.checkpoint.run_dir import RunFolder, refuse_if_held
from daguerre.remote.run import RemoteHome
from daguerre.storage import address, bucket


@dataclass
class LocalHome:
    """A run in a folder that all ranks see."""

    folder: RunFolder
    """To read and write."""
    say: Callable[[str], None] = print
    """Tells a person; a local folder has nothing to say."""

    @property
    def name(self) -> str:
        """What people are shown."""
        return str(self.folder.path)

    def refuse_if_held(self) -> None:
        """RunFolderHeld, naming the process, if one works there."""
        refuse_if_held(self.folder.path)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keeps every other process out while the block runs; rank 0 alone. RunFolderHeld, RunFolderError."""
        with self.folder.hold():
            yield

    def abandon(self) -> None:
        """For a process that ends at once: the kernel lets go of a folder."""


Home = LocalHome | RemoteHome


def of(output_dir: str, run_name: str) -> Home:
    """The home of a run; nothing is created or asked for. UserError for an address that cannot be one.

    `home.hold()` on rank 0 alone; other ranks must not read `home.folder`: on another machine it is not there.
    """
    if address.is_far(output_dir):
        return RemoteHome(bucket.prefix(output_dir) / run_name)
    return LocalHome(RunFolder(Path(output_dir) / run_name))
