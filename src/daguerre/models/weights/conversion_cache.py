"""Folders in the user's cache that were made once from other files, found again by the content of those files.

A folder's name is the digest of its sources and the version of the format, so a changed file never meets an old
folder; it is put in place whole, and processes that want the same one wait for each other. Any of it may be deleted.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import xxhash

from daguerre import user_cache
from daguerre.checkpoint.atomic import locked, make_folder
from daguerre.checkpoint.export import replaced
from daguerre.models.weights import file_digests

VERSION = 2
"""Raise it when what is made of a file changes."""


def root() -> Path:
    """The folder of all of them."""
    return user_cache.folder() / "models"


def once(sources: Sequence[Path], make: Callable[[Path], None], options: str = "") -> Path:
    """The folder that `make` fills from the sources; it is called only if the folder is missing.

    `options` is what else decides about the content.
    """
    digest = xxhash.xxh3_128(options.encode())
    for source in sources:
        digest.update(f"{source.name} {file_digests.xxh3_128(source)};".encode())
    folder = root() / f"{digest.hexdigest()}-{VERSION}"
    if folder.is_dir():
        return folder
    # Asked again under the lock: another process may have made it meanwhile.
    with _locked(folder):
        if not folder.is_dir():
            with replaced(folder) as fresh:
                make(fresh)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other processes out; the lock ends with the process."""
    make_folder(path.parent)
    with locked(path.with_name(f".{path.name}.lock")):
        yield
