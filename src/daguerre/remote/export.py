"""The newest export of a run in an object store: a reader gets the old one or the new one, whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from daguerre.checkpoint import manifest
from daguerre.checkpoint.export import replaced
from daguerre.checkpoint.manifest import NAME, Entry
from daguerre.remote.sealed_files import Bundle
from daguerre.storage.bucket import Prefix
from daguerre.storage.errors import Missing

_FOLDER = "pipeline"
_PIECE_BYTES = 8 << 20


def send(run: Prefix, folder: Path, still: Callable[[], bool]) -> bool:
    """Sends an export; the one before goes once this one is there. False, and nothing is replaced, where `still` says
    that another one has taken its place on the disk meanwhile. StoreError, OSError, Conflict."""
    bundle = Bundle(run / _FOLDER)
    attempt = bundle.attempt()
    entries, tags = {}, {}
    try:
        for path in sorted(one for one in folder.rglob("*") if one.is_file()):
            name = path.relative_to(folder).as_posix()
            sent = bundle.at.send(f"{attempt}/{name}", partial(_pieces, path), path.stat().st_size)
            entries[name], tags[name] = Entry("file", sent.size_bytes, sent.sha256), sent.tag
        whole = still()
    except FileNotFoundError as error:
        if isinstance(error, Missing):
            raise
        whole = False
    if not whole:
        bundle.discard(attempt)
        return False
    bundle.seal(attempt, entries, tags)
    bundle.clear(keep=attempt)
    return True


def fetch(run: Prefix, folder: Path) -> bool:
    """Brings the export to a local folder; False where there is none. StoreError, OSError, Damaged."""
    bundle = Bundle(run / _FOLDER)
    sealed = bundle.read()
    if sealed is None:
        return False
    if (folder / NAME).is_file() and (folder / NAME).read_bytes() == sealed.data:
        return True
    fresh = folder.with_name(f".{folder.name}.fetched")
    bundle.bring(fresh, "")
    with replaced(folder) as made:
        for path in manifest.read(fresh):
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(fresh / path, made / path)
        shutil.move(fresh / NAME, made / NAME)
    shutil.rmtree(fresh)
    return True


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
