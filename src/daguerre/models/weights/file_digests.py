"""Digests of files of weights, remembered in the user's cache as long as a file was not touched, as the system says."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from daguerre import digests, documents, user_cache
from daguerre.checkpoint.atomic import make_folder, write_json_atomically


def xxh3_128(path: Path, anew: bool = False) -> str:
    """xxh3_128 of a file, hex; `anew`: it is read whatever is remembered. OSError."""
    return remembered(stamp(path), lambda: digests.xxh3_128(path), anew)


def sha256(path: Path) -> str:
    """SHA-256 of a file, hex. OSError."""
    return remembered({**stamp(path), "of": "sha256"}, lambda: digests.sha256([path]))


def stamp(path: Path) -> dict[str, Any]:
    """The facts of a file that change when it is touched, as the system has them. OSError."""
    stat = path.stat()
    # ctime as well: programs that copy or unpack set mtime back, and nobody can set ctime.
    times = {"mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}
    return {"device": stat.st_dev, "inode": stat.st_ino, "size": stat.st_size, **times}


def remembered(known: Mapping[str, Any], compute: Callable[[], str], anew: bool = False) -> str:
    """A text that depends on what is `known` alone, from the user's cache folder or computed."""
    name = xxhash.xxh3_128_hexdigest(json.dumps(known, sort_keys=True).encode())
    place = user_cache.folder() / "digests" / f"{name}.json"
    if not anew:
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = documents.undigested(place)
            if found["of"] == known:  # the name is a digest: two keys may share it
                return str(found["is"])
    value = compute()
    with suppress(OSError):  # it is computed again next time
        make_folder(place.parent)
        write_json_atomically(place, documents.digested({"of": known, "is": value}))
    return value
