"""Any slice of any tensor of a checkpoint, whoever wrote it: one process or many, split in whatever way.

Only the bytes that are asked for are read. Nothing is verified here: let `Store.recover` or `ShardedStore.recover` find
the checkpoint, which reads all of it. `Store.load` reads whole tensors and verifies the very bytes that it uses.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from daguerre.checkpoint import contents, manifest, shards
from daguerre.checkpoint.manifest import CheckpointError, Entry
from daguerre.checkpoint.safetensors import dtype_of
from daguerre.checkpoint.shards import Groups, Index, Region, Stored


@dataclass(frozen=True)
class ShardReader:
    """An open checkpoint."""

    folder: Path
    index: Index
    """Shape and dtype of every tensor, by group and name."""
    _entries: Mapping[str, Entry] = field(repr=False)
    _files: ExitStack = field(repr=False)
    _open: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def read(self, group: str, name: str, region: Region | None = None) -> Tensor:
        """A slice of a tensor, or all of it, on the CPU. CheckpointError if there is no such tensor or slice."""
        stored = self._stored(group, name)
        wanted = region or shards.full_region(stored.shape)
        tensor = torch.empty(wanted.shape, dtype=stored.dtype)
        self._fill(tensor, stored, wanted, name)
        return tensor

    def fill(self, groups: Groups) -> None:
        """Put into every piece what it lies over: the inverse of saving the same groups, whatever the ranks were.

        A tensor of `groups` must be there with its shape; what else the checkpoint holds is left out. A dtype that
        differs is an error, too: nothing is rounded here. CheckpointError, before anything is read, lists what does
        not fit.
        """
        problems = [self._problem(group, name, each) for group, named in groups.items() for name, each in named.items()]
        if found := [problem for problem in problems if problem]:
            more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
            raise CheckpointError(f"{self.folder} does not match this run: {'; '.join(found[:5])}{more}")
        with torch.no_grad():
            for group, named in groups.items():
                for name, each in named.items():
                    for piece in each.pieces:
                        self._fill(piece.tensor, self.index[group][name], piece.region, name)

    def has(self, name: str) -> bool:
        """True if there is a document of this name."""
        return f"{name}.json" in self._entries

    def document(self, name: str) -> Any:
        """A document, verified."""
        return json.loads(self.file(f"{name}.json"))

    def file(self, path: str) -> bytes:
        """A file as it was saved, verified."""
        if path not in self._entries:
            raise CheckpointError(f"{self.folder} has no {path}; it has {', '.join(sorted(self._entries))}")
        return manifest.read_file(self.folder, path, self._entries[path])

    def _stored(self, group: str, name: str) -> Stored:
        if group not in self.index:
            raise CheckpointError(f"{self.folder} has no tensors named {group}; it has {', '.join(self.index)}")
        if name not in self.index[group]:
            raise CheckpointError(f"{self.folder} has no tensor {name!r} in {group}")
        return self.index[group][name]

    def _problem(self, group: str, name: str, wanted: shards.ShardedTensor) -> str:
        if name not in self.index.get(group, {}):
            return f"{group} has no {name}"
        stored = self.index[group][name]
        if (stored.shape, stored.dtype) != (tuple(wanted.shape), wanted.dtype):
            return (
                f"{name} of {group} is {list(stored.shape)} {stored.dtype}, expected is {list(wanted.shape)} "
                f"{wanted.dtype}"
            )
        return ""

    def _fill(self, tensor: Tensor, stored: Stored, wanted: Region, name: str) -> None:
        every = shards.full_region(stored.shape)
        if wanted.elements == 0:
            return
        if len(wanted.offsets) != len(stored.shape) or wanted.overlap(every) != wanted:
            raise CheckpointError(f"{name} is {list(stored.shape)}: there is no slice {wanted}")
        found = 0
        for file, key, region in stored.parts:
            if (shared := region.overlap(wanted)) is not None:
                tensor[shared.within(wanted)] = self._part(file, key, region, shared)
                found += shared.elements
        if found != wanted.elements:
            raise CheckpointError(f"{self.folder}: the parts of {name} do not make up {wanted}")

    def _part(self, file: str, key: str, region: Region, wanted: Region) -> Tensor:
        if file not in self._open:
            self._open[file] = self._files.enter_context(safe_open(self.folder / file, "pt"))
        if wanted == region:
            return self._open[file].get_tensor(key)
        return self._open[file].get_slice(key)[wanted.within(region)]


@contextmanager
def opened(folder: Path) -> Iterator[ShardReader]:
    """A checkpoint of either layout, for reading slices. Damaged, CheckpointError as in `Store.load`."""
    entries = manifest.read(folder)
    with ExitStack() as files:
        yield ShardReader(folder, _index(folder, entries), entries, files)


def _index(folder: Path, entries: Mapping[str, Entry]) -> Index:
    index = contents.read_index(folder, entries) if contents.is_sharded(entries) else {}
    for path, entry in entries.items():
        if entry.kind == "tensors":
            with safe_open(folder / path, "pt") as file:
                index[path.rpartition(".")[0]] = {key: _stored(path, key, file.get_slice(key)) for key in file.keys()}  # noqa: SIM118 (no mapping)
    return index


def _stored(path: str, key: str, header: Any) -> Stored:
    shape = tuple(header.get_shape())
    return Stored(shape, dtype_of(header.get_dtype()), ((path, key, shards.full_region(shape)),))
