"""A store that all processes of a run save into and verify together: the protocol of store.py over all ranks' files.
One process alone writes the layout of store.py.

Each rank writes and syncs its own parts of tensors in the one temporary folder; rank 0 gathers sizes and digests, adds
documents, files, the index of slices and the manifest over all, and alone gives the folder its name. Whatever goes
wrong on one rank is the error of all, and nothing is committed. Every method is a collective call.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from daguerre.checkpoint import contents, shards, shared_reading
from daguerre.checkpoint.atomic import make_folder, sync_folder, write_durably
from daguerre.checkpoint.manifest import CheckpointError, Entry, Kind
from daguerre.checkpoint.ranks import Ranks
from daguerre.checkpoint.retention import Keep
from daguerre.checkpoint.safetensors import encode
from daguerre.checkpoint.shards import Groups, Region
from daguerre.checkpoint.store import Found, Store

Own = dict[str, dict[str, Tensor]]
"""What one rank writes: tensors by file and key."""


@dataclass(frozen=True)
class Planned:
    """A save that all ranks have agreed on, before anything is on disk."""

    name: str
    own: Own
    """Views of the caller's tensors: copy them, or write them before they change."""
    index: bytes
    """The file that finds all ranks' slices."""
    needed_bytes: int
    """What all ranks write together."""
    small: Mapping[str, contents.Part]
    """Documents and files, on rank 0."""
    plain: bool
    """One process writes whole tensors, as `Store.save` does: there is no index."""

    @property
    def own_bytes(self) -> int:
        """What this rank writes."""
        return sum(t.numel() * t.element_size() for tensors in self.own.values() for t in tensors.values())

    def entries(self, reports: Sequence[Mapping[str, Any]]) -> dict[str, Entry]:
        """The manifest's entries of all ranks' files, from what each rank said of its own."""
        kind: Kind = "tensors" if self.plain else "parts"
        return {file: Entry(kind, *written) for report in reports for file, written in report["files"].items()}

    def beside(self) -> dict[str, contents.Part]:
        """What rank 0 writes beside the tensors."""
        index = {} if self.plain else {shards.INDEX: contents.Part("slices", [self.index])}
        return {**self.small, **index}


@dataclass
class ShardedStore:
    """Checkpoints in the folder `root`, which all ranks see; see `Store` for names and what is left alone."""

    root: Path
    ranks: Ranks
    _store: Store = field(init=False, repr=False)
    _planned_for: str = field(default="", init=False, repr=False)
    _index: bytes = field(default=b"", init=False, repr=False)
    _mine: list[tuple[str, str, str, str, Region]] = field(default_factory=list, init=False, repr=False)
    """File, key, group, name and region of what this rank writes."""
    _needed_bytes: int = field(default=0, init=False, repr=False)
    _plain: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self._store = Store(self.root, verify=self._verify)

    def plan(
        self, name: str, groups: Groups, documents: Mapping[str, Any], files: Mapping[str, bytes] | None = None
    ) -> Planned:
        """Agree on a save: who writes which slices. Rank 0's `documents` and `files` count, others may give none.

        Quick from the second time on, as long as ranks hold the same slices. ValueError, on every rank, for what could
        not be read back, for ranks that disagree, and for tensors with gaps or overlaps.
        """
        held: Any = None
        mine: dict[str, Any] = {"name": name, "digest": "", "error": None}
        small: dict[str, contents.Part] = {}
        try:
            held = shards.holding(groups)
            mine["digest"] = hashlib.sha256(json.dumps(held).encode()).hexdigest()
            # Groups without tensors: their names are checked.
            small = contents.collect({group: {} for group in groups}, documents, files or {})
        except ValueError as error:
            mine["error"] = str(error)
        mine["known"] = mine["digest"] == self._planned_for
        everyone = self.ranks.collect(mine)
        replan = self._agreed(lambda: _needs_plan(everyone))
        if replan:
            holdings = self.ranks.collect(held)
            told = self._agreed(lambda: shards.to_bytes(shards.plan(holdings)).decode())
            self._remember(told.encode(), mine["digest"])
        own: Own = {}
        for file, key, group, tensor, region in self._mine:
            own.setdefault(file, {})[key] = groups[group][tensor].cut(region)
        small = {path: part for path, part in small.items() if part.kind != "tensors"}
        return Planned(name, own, self._index, self._needed_bytes, small, self._plain)

    def _remember(self, told: bytes, digest: str) -> None:
        """Keeps of a plan what every save needs: it is long where there are many ranks."""
        index, rank = shards.from_bytes(told), self.ranks.rank
        self._index, self._planned_for, self._mine, self._needed_bytes = told, digest, [], 0
        self._plain = shards.is_plain(index)
        for group, stored in index.items():
            own_files = (shards.file_of(group, rank, self.ranks.count), f"{group}.safetensors")
            for name, each in stored.items():
                for file, key, region in each.parts:
                    self._needed_bytes += region.elements * each.dtype.itemsize
                    if file in own_files:
                        self._mine.append((file, key, group, name, region))

    def commit(self, planned: Planned, own: Own | None = None) -> Path:
        """Write a planned save; when this returns, it survives a kill and a power cut.

        `own` are copies of `planned.own`. CheckpointError, the same on every rank, if the disk of any of them refuses:
        nothing of the new one stays, earlier ones are untouched. RanksGone if one does not answer: then the new one is
        absent, or whole if the rank was lost after the commit.
        """
        temporary = self._store.temporary(planned.name)
        try:
            temporary = self.root / self._together(lambda: self._begun(temporary, planned))
            reports = self.ranks.collect(self._written(temporary, planned.own if own is None else own))
            self._together(lambda: self._finished(temporary, planned, reports))
        finally:
            if self.ranks.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
        return self.root / planned.name

    def recover(self) -> Found:
        """`Store.recover`, by rank 0; each rank reads a share of the files for it, and all get the answer."""
        return self._found(lambda: self._store.recover())

    def rewind(self, name: str) -> Found:
        """`Store.rewind`, likewise."""
        return self._found(lambda: self._store.rewind(name))

    def newest_verified(self) -> Found:
        """`Store.newest_verified`, likewise."""
        return self._found(lambda: self._store.newest_verified())

    def purge(self, keep: Keep) -> list[str]:
        """`Store.purge`, likewise."""
        return self._together(lambda: self._store.purge(keep.newest, keep.backup_every))

    def names(self) -> list[str]:
        """`Store.names`; no collective call."""
        return self._store.names()

    def _found(self, action: Callable[[], Found]) -> Found:
        def asked() -> list[Any]:
            found = action()
            return [found.path and found.path.name, found.notices]

        name, notices = self._together(asked)
        return Found(name and self.root / name, notices)

    def _begun(self, temporary: Path, planned: Planned) -> str:
        try:
            make_folder(self.root)
            temporary.mkdir()
        except OSError as error:
            raise CheckpointError(self._store.refusal(planned.name, error, planned.needed_bytes)) from error
        return temporary.name

    def _written(self, temporary: Path, own: Own) -> dict[str, Any]:
        """This rank's files, safe on disk: their sizes and digests, or why not."""
        entries = {}
        try:
            for file, tensors in own.items():
                written = write_durably(temporary / file, encode(tensors))
                entries[file] = [written.size_bytes, written.sha256]
            sync_folder(temporary)
        except OSError as error:
            return {"error": shared_reading.refusal(error, temporary)}
        return {"files": entries}

    def _finished(self, temporary: Path, planned: Planned, reports: list[dict[str, Any]]) -> None:
        """What only rank 0 does."""
        try:
            for rank, report in enumerate(reports):
                if "error" in report:
                    number, text, where = report["error"]
                    raise OSError(number, text, f"{where} (rank {rank})")
            entries = planned.entries(reports)
            shared_reading.wait_for(temporary, entries)
            entries |= contents.write_files(temporary, planned.beside())
            contents.seal(temporary, entries)
            self._store.publish(temporary, planned.name)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(self._store.refusal(planned.name, error, planned.needed_bytes)) from error

    def _verify(self, path: Path) -> None:
        """`manifest.verify` on rank 0, the reading shared with the others, who wait in `_together`."""
        self.ranks.tell({"verify": path.name})
        shared_reading.judge(self._verified_share(path.name))

    def _verified_share(self, name: str) -> list[dict[str, Any]]:
        found = shared_reading.verified(self.root / name, self.ranks.rank, self.ranks.count)
        return self.ranks.collect(found)

    def _agreed(self, action: Callable[[], Any]) -> Any:
        """What rank 0 makes of what it gathered, on every rank; so is its ValueError."""
        told: dict[str, Any] = {}
        if self.ranks.rank == 0:
            try:
                told = {"result": action()}
            except ValueError as error:
                told = {"error": str(error)}
        told = self.ranks.tell(told)
        if "error" in told:
            raise ValueError(told["error"])
        return told["result"]

    def _together(self, action: Callable[[], Any]) -> Any:
        """Rank 0 acts, the others verify what it asks them to; all get its JSON result, or its CheckpointError."""

        def asked() -> Any:
            try:
                return action()
            except OSError as error:
                raise CheckpointError(f"{error.filename or self.root}: {error.strerror}") from error

        return self.ranks.led(asked, lambda told: self._verified_share(told["verify"]))


def _needs_plan(everyone: list[dict[str, Any]]) -> bool:
    """ValueError where a rank cannot save or saves something else."""
    for rank, one in enumerate(everyone):
        if one["error"]:
            raise ValueError(one["error"] if len(everyone) == 1 else f"rank {rank}: {one['error']}")
        if one["name"] != everyone[0]["name"]:
            raise ValueError(f"rank {rank} saves {one['name']}, rank 0 saves {everyone[0]['name']}")
    return not all(one["known"] for one in everyone)
