"""Folders in the user's cache that were made once from other files, found again by the content of those files.

A folder's name is the digest of its sources and the version of the format, so a changed file never meets an old
folder; it is put in place whole, and processes that want the same one wait for each other. Any of it may be deleted.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from daguerre import digests, documents, user_cache
from daguerre.checkpoint.atomic import locked, make_folder, write_json_atomically
from daguerre.checkpoint.export import replaced
from daguerre.models.weights import file_digests, seals

_SMALL = ".digests.json"
VERSION = 3
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
    if _is_whole(folder):
        return folder
    # Asked again under the lock: another process may have made it meanwhile.
    with _locked(folder):
        if not _is_whole(folder):
            with replaced(folder) as fresh:
                make(fresh)
                write_json_atomically(fresh / _SMALL, documents.digested(_small(fresh)))
    return folder


def _is_whole(folder: Path) -> bool:
    """True if a folder is there and as it was made: else it is made again, as a user could not mend it."""
    with suppress(OSError, ValueError):
        return documents.undigested(folder / _SMALL) == _small(folder) and seals.are_whole(folder)
    return False


def _small(folder: Path) -> dict[str, str]:
    """Digests of all files but those of tensors, which have their own, by relative path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != _SMALL)
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: "" if path.suffix == ".safetensors" else digests.xxh3_128(path) for name, path in names.items()}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other processes out; the lock ends with the process."""
    make_folder(path.parent)
    with locked(path.with_name(f".{path.name}.lock")):
        yield
