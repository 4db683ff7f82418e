"""Contents of a checkpoint, and their way into a folder and back: groups of tensors, JSON documents, plain files.

Writing is safe on disk when it returns, reading verifies every byte. Which folder, and when it counts as saved, is
`store.py`'s.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from daguerre.checkpoint import manifest, shards
from daguerre.checkpoint.atomic import make_folder, sync_folder, to_json, write_durably
from daguerre.checkpoint.manifest import CheckpointError, Entry, Kind
from daguerre.checkpoint.safetensors import decode, encode

_STEM = re.compile(r"[A-Za-z0-9_-]+")

TensorGroups = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it was saved; tensors are on the CPU."""

    name: str
    tensors: dict[str, dict[str, Tensor]]
    documents: dict[str, Any]
    files: dict[str, bytes]


@dataclass(frozen=True)
class Part:
    """One file to be written."""

    kind: Kind
    chunks: Iterable[Any]


def collect(groups: TensorGroups, documents: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Part]:
    """Every file of a checkpoint by path. ValueError for what could not be read back; nothing is written yet."""
    parts: dict[str, Part] = {}
    for name, group in groups.items():
        parts[f"{name}.safetensors"] = Part("tensors", encode(group))
    for name, document in documents.items():
        try:
            parts[f"{name}.json"] = Part("document", [to_json(document)])
        except (ValueError, TypeError) as error:
            raise ValueError(f"document {name!r} cannot be saved: {error}") from None
    bad = [name for name in (*groups, *documents) if not _STEM.fullmatch(name)]
    bad += [path for path in files if not manifest.is_safe_path(path) or path in parts]
    bad += [path for path in (*parts, *files) if path in (manifest.NAME, shards.INDEX)]
    if bad:
        raise ValueError(f"cannot be files of a checkpoint (unsafe or taken names): {', '.join(map(repr, bad))}")
    return parts | {path: Part("file", [data]) for path, data in files.items()}


def write_files(folder: Path, parts: Mapping[str, Part]) -> dict[str, Entry]:
    """Write files, each safe on disk, into a folder whose own entries are not yet."""
    entries = {}
    for path, part in parts.items():
        make_folder((folder / path).parent)
        written = write_durably(folder / path, part.chunks)
        entries[path] = Entry(part.kind, written.size_bytes, written.sha256)
        if (folder / path).parent != folder:
            sync_folder((folder / path).parent)
    return entries


def seal(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Write the manifest of files that are safe on disk; then the folder is complete and safe, too."""
    manifest.write(folder, entries)
    sync_folder(folder)


def read(folder: Path, only: Collection[str] | None = None) -> Checkpoint:
    """The checkpoint in a folder. Damaged names a file that differs; `only` as in `Store.load`."""
    groups: dict[str, dict[str, Tensor]] = {}
    documents: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    entries = manifest.read(folder)
    if is_sharded(entries):
        index = read_index(folder, entries)
        groups = {name: _assembled(folder, entries, index[name]) for name in index if only is None or name in only}
    for path, entry in entries.items():
        stem = path.rpartition(".")[0]
        if entry.kind in ("parts", "slices"):
            continue
        if entry.kind == "tensors":
            if only is None or stem in only:
                groups[stem] = decode(manifest.read_file(folder, path, entry))
        elif entry.kind == "document":
            documents[stem] = json.loads(manifest.read_file(folder, path, entry))
        else:
            files[path] = manifest.read_file(folder, path, entry)
    if only is not None and (missing := sorted(set(only) - set(groups))):
        raise CheckpointError(f"{folder} has no tensors named {', '.join(missing)}; it has {', '.join(groups)}")
    return Checkpoint(folder.name, groups, documents, files)


def groups(folder: Path) -> list[str]:
    """Names of the groups of tensors in the checkpoint in a folder, of either layout. Damaged."""
    entries = manifest.read(folder)
    sharded = list(read_index(folder, entries)) if is_sharded(entries) else []
    return sharded + [path.rpartition(".")[0] for path, entry in entries.items() if entry.kind == "tensors"]


def is_sharded(entries: Mapping[str, Entry]) -> bool:
    """True if several ranks wrote these files."""
    return shards.INDEX in entries and entries[shards.INDEX].kind == "slices"


def read_index(folder: Path, entries: Mapping[str, Entry]) -> shards.Index:
    """Index of the slices of a sharded checkpoint. CheckpointError for a newer format."""
    data = manifest.read_file(folder, shards.INDEX, entries[shards.INDEX])
    try:
        return shards.from_bytes(data)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}: use the version that wrote it, or a newer one") from None


def _assembled(folder: Path, entries: Mapping[str, Entry], stored: Mapping[str, shards.Stored]) -> dict[str, Tensor]:
    """The whole tensors of a group that several ranks wrote, every byte verified as it is read, a file at a time."""
    tensors = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in stored.items()}
    by_file: dict[str, list[tuple[str, str, shards.Region]]] = {}
    for name, each in stored.items():
        for file, key, region in each.parts:
            by_file.setdefault(file, []).append((name, key, region))
    for file, wanted in sorted(by_file.items()):
        parts = decode(manifest.read_file(folder, file, entries[file]))
        for name, key, region in wanted:
            tensors[name][region.within(shards.full_region(stored[name].shape))] = parts[key]
    return tensors
