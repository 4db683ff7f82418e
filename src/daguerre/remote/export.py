"""The newest export of a run in an object store: a reader gets the old one or the new one, whole."""

import secrets
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from daguerre.checkpoint import manifest
from daguerre.checkpoint.export import replaced
from daguerre.checkpoint.manifest import NAME
from daguerre.remote.sealed_files import SealedFiles, Upload
from daguerre.storage.bucket import Prefix
from daguerre.storage.errors import Missing

_PIECE_BYTES = 8 << 20


def send(run: Prefix, folder: Path, still: Callable[[], bool]) -> bool:
    """Sends an export; the one before goes once this one is there. False, and nothing is replaced, if `still` says
    that another one has taken its place on the disk meanwhile. StoreError, OSError, Conflict."""
    upload = Upload(SealedFiles(run / folder.name), secrets.token_hex(8))
    try:
        for path in sorted(one for one in folder.rglob("*") if one.is_file()):
            upload.send(path.relative_to(folder).as_posix(), "file", partial(_pieces, path), path.stat().st_size)
        whole = still()
    except FileNotFoundError as error:
        if isinstance(error, Missing):
            raise
        whole = False
    if whole:
        upload.seal()
        upload.clear()
    else:
        upload.abort()
    return whole


def fetch(run: Prefix, folder: Path) -> bool:
    """Fetches the export to a local folder; False without an export. StoreError, OSError, Damaged."""
    sealed = SealedFiles(run / folder.name)
    there = sealed.read()
    if there is None:
        return False
    if (folder / NAME).is_file() and (folder / NAME).read_bytes() == there.data:
        return True
    fresh = folder.with_name(f".{folder.name}.fetched")
    sealed.fetch_newest(fresh, "")
    with replaced(folder) as made:
        for path in (*manifest.read(fresh), NAME):
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(fresh / path, made / path)
    shutil.rmtree(fresh)
    return True


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
