"""Which kind of source a path holds, by its suffix or by what lies in the folder, for commands that take paths."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from daguerre.credentials import STORES, put_aside, scheme
from daguerre.data.folder.scan import EXTENSIONS
from daguerre.errors import UserError
from daguerre.storage import io as storage_io

KINDS = {
    "webdataset": "tar shards",
    "parquet": "parquet tables",
    "csv": "CSV tables",
    "huggingface": "a Hugging Face data set",
    "folder": "a folder of pictures",
}
"""Sources that a path can name, in the order in which a folder is taken for one of them, and how people call them."""
_SUFFIXES = {".tar": "webdataset", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
_ZIPPED = (".gz", ".zst", ".bz2")
_HUGGINGFACE = {"dataset_info.json", "dataset_dict.json"}
_FAR = re.compile(r"[a-z][a-z0-9+.-]*://")


def kind(paths: Sequence[str]) -> str:
    """The source of one or more paths. UserError where it cannot be told, or where they are of several kinds."""
    found = {path: _kind(path) for path in paths}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{path} ({KINDS[name]})" for path, name in found.items())
        raise UserError(f"one kind of data at a time, got {listed}: name each in a recipe (data.sources)")
    return next(iter(found.values()))


def _kind(path: str) -> str:
    far = _FAR.match(path) is not None and not path.startswith("file:")
    plain = path.partition("?")[0] if far else path
    by_suffix = _of_name(plain)
    if by_suffix:
        return by_suffix
    if path.startswith("pipe:"):
        return "webdataset"
    if far and scheme(path) not in STORES:
        raise UserError(
            f"{path} is of no kind that is known by its name ({', '.join(_SUFFIXES)}): write data.source=KIND"
        )
    if far and put_aside(path) != path:
        raise UserError(f"{path}: credentials come from the environment, never from an address")
    if far:
        return _under_prefix([place.name for place in storage_io.listing(path)], path)
    local = Path(path.removeprefix("file://").removeprefix("file:")).expanduser()
    if local.is_dir():
        return _in_folder(sorted(entry.name for entry in os.scandir(local)), path)
    known = ", ".join(_SUFFIXES)
    if local.exists():
        raise UserError(
            f"{path} is of no kind that is known by its name ({known}, or a folder): write data.source=KIND"
        )
    raise UserError(f"there is nothing at {path!r} (seen from {os.getcwd()}), and no recipe of that name")


def _of_name(name: str) -> str | None:
    """The kind of a file by its name; patterns such as `part-{000..009}.tar` and `*.tar` are names, too."""
    lower = name.lower()
    for zipped in _ZIPPED:
        lower = lower.removesuffix(zipped)
    return next((of for suffix, of in _SUFFIXES.items() if lower.rstrip("}").endswith(suffix)), None)


def _under_prefix(names: Sequence[str], path: str) -> str:
    """The kind of what a store lists. UserError for what is read on this machine only."""
    of = _in_folder(names, path)
    if of in ("webdataset", "parquet", "csv"):
        return of
    found = f"{KINDS[of]}, which is read on this machine only: copy it here" if names else "nothing: is it spelled so?"
    raise UserError(
        f"data.path: {path!r} holds no shards or tables ({', '.join(_SUFFIXES)}). There is {found}. For files in "
        f"folders inside it write {path}**/*.tar"
    )


def _in_folder(names: Iterable[str], path: str) -> str:
    """The kind of a folder with these names in it.

    img2dataset writes a table of what it has packed beside each shard; so shards go before tables, and pictures that
    lie beside either make it a question.
    """
    listed = list(names)
    held = {of for name in listed if (of := _of_name(name))}
    if _HUGGINGFACE & {os.path.basename(name) for name in listed}:
        return "huggingface"
    pictures = any(name.lower().endswith(EXTENSIONS) for name in listed)
    if held and pictures:
        several = " and ".join(KINDS[of] for of in KINDS if of in held)
        raise UserError(f"{path} holds {several} beside pictures: say which is meant, with data.source=KIND")
    return next((of for of in KINDS if of in held), "folder")
