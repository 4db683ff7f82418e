"""Detects the kind of source at a path, by its suffix or by the names in a folder, for commands that take paths."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from daguerre.credentials import STORES, redact, scheme
from daguerre.data.folder.captions import METADATA
from daguerre.data.folder.scan import EXTENSIONS
from daguerre.errors import UserError
from daguerre.storage import io as storage_io

KINDS = {
    "webdataset": "tar shards",
    "parquet": "parquet tables",
    "csv": "CSV tables",
    "jsonl": "JSON Lines",
    "huggingface": "a Hugging Face data set",
    "folder": "a folder of images",
}
"""Sources that a path can name, in the order in which a folder is tried, and their names for people."""
_SUFFIXES = {".tar": "webdataset", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
_SUFFIXES |= {".jsonl": "jsonl", ".ndjson": "jsonl"}
_ZIPPED = (".gz", ".zst", ".bz2")
_HUGGINGFACE = {"dataset_info.json", "dataset_dict.json"}
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")


def kind(paths: Sequence[str]) -> str:
    """The source of one or more paths. UserError if nothing decides it, or for several kinds."""
    found = {path: _kind(path) for path in paths}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{path} ({KINDS[name]})" for path, name in found.items())
        what = f"only one kind of data at a time, got {listed}: to combine them, list them in a recipe (data.sources)"
        raise UserError(what, code="conflict", setting="data.path")
    return next(iter(found.values()))


def _kind(path: str) -> str:
    remote = _REMOTE.match(path) is not None and not path.startswith("file:")
    if by_suffix := _of_name(path.partition("?")[0] if remote else path):
        return by_suffix
    if path.startswith("pipe:"):
        return "webdataset"
    if remote and scheme(path) in STORES:
        if redact(path) != path:
            what = f"{path}: credentials come from the environment, never from an address"
            raise UserError(what, setting="data.path")
        return _under_prefix([location.name for location in storage_io.listing(path)], path)
    local = Path(path.removeprefix("file://").removeprefix("file:")).expanduser()
    if not remote and local.is_dir():
        return _in_folder(sorted(entry.name for entry in os.scandir(local)), path)
    if not remote and not local.exists():
        what = f"there is nothing at {path!r} (seen from {os.getcwd()}), and no recipe of that name"
        raise UserError(what, code="missing", setting="data.path")
    known = ", ".join(_SUFFIXES) + ", or a folder" * (not remote)
    what = f"{path} is not a known kind of data ({known}): set data.source=KIND"
    raise UserError(what, code="unknown", setting="data.source")


def _of_name(name: str) -> str | None:
    """The kind of a file by its name, or of a pattern such as `part-{000..009}.tar`."""
    lower = name.lower()
    for zipped in _ZIPPED:
        lower = lower.removesuffix(zipped)
    return next((of for suffix, of in _SUFFIXES.items() if lower.rstrip("}").endswith(suffix)), None)


def _under_prefix(names: Sequence[str], path: str) -> str:
    """The kind of a store's listing. UserError for kinds that are read on this machine only."""
    of = _in_folder(names, path)
    if of in ("webdataset", "parquet", "csv", "jsonl"):
        return of
    found = (
        f"{KINDS[of]}, which can only be read locally: copy it to this machine"
        if names
        else "nothing: check the spelling"
    )
    raise UserError(
        f"data.path: {path!r} holds no shards or tables ({', '.join(_SUFFIXES)}). There is {found}. For files in "
        f"folders inside it write {path}**/*.tar",
        code="unsupported",
        setting="data.path",
    )


def _in_folder(names: Iterable[str], path: str) -> str:
    """The kind of a folder with these names in it. Shards go before tables, as img2dataset writes a table next to each;
    images next to either are ambiguous: UserError."""
    listed = list(names)
    held = {of for name in listed if os.path.basename(name) != METADATA and (of := _of_name(name))}
    if _HUGGINGFACE & {os.path.basename(name) for name in listed}:
        return "huggingface"
    images = any(name.lower().endswith(EXTENSIONS) for name in listed)
    if held and images:
        several = " and ".join(KINDS[of] for of in KINDS if of in held)
        what = f"{path} holds {several} and images: choose which to read with data.source=KIND"
        raise UserError(what, code="conflict", setting="data.source")
    return next((of for of in KINDS if of in held), "folder")
