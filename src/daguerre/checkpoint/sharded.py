"""A store that all processes of a run save into and verify together: the protocol of store.py over all ranks' files.
One process alone writes the layout of store.py.

Each rank writes and syncs its own parts of tensors in the one temporary folder; rank 0 gathers sizes and digests, adds
documents, files, the index of slices and the manifest over all, and alone gives the folder its name. Whatever goes
wrong on one rank is the error of all, and nothing is committed. Every method is a collective call.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from daguerre.checkpoint import contents, manifest, shards
from daguerre.checkpoint.atomic import make_folder, sync_folder, write_durably
from daguerre.checkpoint.manifest import CheckpointError, Damaged, Entry, Kind
from daguerre.checkpoint.retention import RetentionPolicy
from daguerre.checkpoint.safetensors import encode
from daguerre.checkpoint.shards import Groups, Region
from daguerre.checkpoint.store import Found, Store
from daguerre.ranks import Ranks

LocalFiles = dict[str, dict[str, Tensor]]
"""Tensors that one rank writes, by file and key."""
_APPEARS_SECONDS = 10.0
"""Longest time until a file that another node wrote is seen here."""
_STOPPED = "rank 0 stopped with an error"


@dataclass(frozen=True)
class Planned:
    """A save that all ranks have agreed on, before anything is on disk."""

    name: str
    local: LocalFiles
    """Views of the caller's tensors: copy them, or write them before they change."""
    index: bytes
    """The file that finds all ranks' slices."""
    needed_bytes: int
    """Bytes of all ranks."""
    small: Mapping[str, contents.Part]
    """Documents and files, on rank 0."""
    plain: bool
    """One process writes whole tensors, as `Store.save` does: there is no index."""

    @property
    def local_bytes(self) -> int:
        return sum(t.nbytes for tensors in self.local.values() for t in tensors.values())

    def entries(self, reports: Sequence[Mapping[str, Any]]) -> dict[str, Entry]:
        """The manifest's entries of all ranks' files, from each rank's report."""
        kind: Kind = "tensors" if self.plain else "parts"
        return {file: Entry(kind, *written) for report in reports for file, written in report["files"].items()}

    def beside(self) -> dict[str, contents.Part]:
        """Files that rank 0 writes in addition to the tensors."""
        index = {} if self.plain else {shards.INDEX: contents.Part("slices", [self.index])}
        return {**self.small, **index}


@dataclass
class ShardedStore(Store):
    """Checkpoints in the folder `root`, which all ranks see; see `Store` for names and what is left alone."""

    ranks: Ranks
    _planned_for: str = field(default="", init=False, repr=False)
    _index: bytes = field(default=b"", init=False, repr=False)
    _own: list[tuple[str, str, str, str, Region]] = field(default_factory=list, init=False, repr=False)
    """File, key, group, name and region of what this rank writes."""
    _needed_bytes: int = field(default=0, init=False, repr=False)
    _plain: bool = field(default=False, init=False, repr=False)

    def plan(
        self, name: str, groups: Groups, documents: Mapping[str, Any], files: Mapping[str, bytes] | None = None
    ) -> Planned:
        """Agree on a save: who writes which slices. Rank 0's `documents` and `files` count, others may give none.

        Quick from the second time on, as long as ranks hold the same slices. ValueError, on every rank, for what could
        not be read back, for ranks that disagree, and for tensors with gaps or overlaps.
        """
        held: Any = None
        report: dict[str, Any] = {"name": name, "digest": "", "error": None}
        small: dict[str, contents.Part] = {}
        try:
            held = shards.holding(groups)
            report["digest"] = hashlib.sha256(json.dumps(held).encode()).hexdigest()
            # Groups without tensors: their names are checked.
            small = contents.collect({group: {} for group in groups}, documents, files or {})
        except ValueError as error:
            report["error"] = str(error)
        report["known"] = report["digest"] == self._planned_for
        everyone = self.ranks.collect(report)
        replan = self._agreed(lambda: _needs_plan(everyone))
        if replan:
            holdings = self.ranks.collect(held)
            index_bytes = self._agreed(lambda: shards.to_bytes(shards.plan(holdings)).decode())
            self._remember(index_bytes.encode(), report["digest"])
        local: LocalFiles = {}
        for file, key, group, tensor, region in self._own:
            local.setdefault(file, {})[key] = groups[group][tensor].slice(region)
        small = {path: part for path, part in small.items() if part.kind != "tensors"}
        return Planned(name, local, self._index, self._needed_bytes, small, self._plain)

    def _remember(self, index_bytes: bytes, digest: str) -> None:
        """Keeps of a plan what every save needs: it is long where there are many ranks."""
        index, rank = shards.from_bytes(index_bytes), self.ranks.rank
        self._index, self._planned_for, self._own, self._needed_bytes = index_bytes, digest, [], 0
        self._plain = shards.is_unsharded(index)
        for group, stored in index.items():
            own_files = (shards.file_of(group, rank, self.ranks.count), f"{group}.safetensors")
            for name, each in stored.items():
                for file, key, region in each.parts:
                    self._needed_bytes += region.elements * each.dtype.itemsize
                    if file in own_files:
                        self._own.append((file, key, group, name, region))

    def commit(self, planned: Planned, local: LocalFiles | None = None) -> Path:
        """Write a planned save; when this returns, it survives a kill and a power cut.

        `local` are copies of `planned.local`. CheckpointError, the same on every rank, if any cannot write: nothing
        of the new one stays, earlier ones are untouched. RanksGone if one does not answer: then the new one is absent,
        or whole if the rank was lost after the commit.
        """
        attempt = self._new_attempt(planned.name)
        try:
            attempt = self._together(lambda: self._begin(planned, attempt))
            reports = self.ranks.collect(self._write(planned, attempt, planned.local if local is None else local))
            self._together(lambda: self._finish(planned, attempt, reports))
        finally:
            if self.ranks.rank == 0:
                shutil.rmtree(self.root / attempt, ignore_errors=True)
        return self.root / planned.name

    def recover(self) -> Found:
        """`Store.recover`, by rank 0; each rank reads a share of the files for it, and all get the answer."""
        return self._found(super().recover)

    def rewind(self, name: str) -> Found:
        return self._found(lambda: super(ShardedStore, self).rewind(name))

    def newest_verified(self) -> Found:
        return self._found(super().newest_verified)

    def purge(self, keep: RetentionPolicy) -> list[str]:
        notices: list[str] = self._together(lambda: super(ShardedStore, self).purge(keep))
        return notices

    def _found(self, action: Callable[[], Found]) -> Found:
        def asked() -> list[Any]:
            found = action()
            return [found.path and found.path.name, found.notices]

        name, notices = self._together(asked)
        return Found(name and self.root / name, notices)

    def _new_attempt(self, name: str) -> str:
        """The name of a folder, not there yet, in which a save can be put together."""
        return self.temporary(name).name

    def _begin(self, planned: Planned, attempt: str) -> str:
        """On rank 0: makes room for a save; the name that counts for all."""
        try:
            make_folder(self.root)
            (self.root / attempt).mkdir()
        except OSError as error:
            raise CheckpointError(self.refusal(planned.name, error, planned.needed_bytes)) from error
        return attempt

    def _write(self, planned: Planned, attempt: str, local: LocalFiles) -> dict[str, Any]:
        """This rank's files, safe on disk: their sizes and digests, or why not."""
        entries = {}
        try:
            for file, tensors in local.items():
                written = write_durably(self.root / attempt / file, encode(tensors))
                entries[file] = [written.size_bytes, written.sha256]
            sync_folder(self.root / attempt)
        except OSError as error:
            return {"error": _refusal(error, self.root / attempt)}
        return {"files": entries}

    def _finish(self, planned: Planned, attempt: str, reports: list[dict[str, Any]]) -> None:
        """On rank 0: the rest of the files, the manifest and the name."""
        temporary = self.root / attempt
        try:
            for rank, report in enumerate(reports):
                if "error" in report:
                    number, text, where = report["error"]
                    raise OSError(number, text, f"{where} (rank {rank})")
            entries = planned.entries(reports)
            _wait_for(temporary, entries)
            entries |= contents.write_files(temporary, planned.beside())
            contents.seal(temporary, entries)
            self.publish(temporary, planned.name)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)  # before the free space is told
            raise CheckpointError(self.refusal(planned.name, error, planned.needed_bytes)) from error

    def read_all(self, path: Path) -> None:
        """`Store.read_all` on rank 0, the reading shared with the others, who wait in `_together`."""
        task = {"name": path.name, "token": secrets.token_hex(8)}
        self.ranks.share(task)
        judge(self._verify_share(**task))

    def _verify_share(self, name: str, token: str) -> list[dict[str, Any]]:
        """Reads what is this rank's of a checkpoint; on rank 0, what all found. `token` is new for each reading."""
        return self.ranks.collect(verified(self.root / name, self.ranks.rank, self.ranks.count))

    def _agreed(self, action: Callable[[], Any]) -> Any:
        """Rank 0 decides; all get its JSON result, or its ValueError."""
        return self.ranks.led(action, ValueError, _STOPPED)

    def _together(self, action: Callable[[], Any]) -> Any:
        """Rank 0 acts, the others verify what it asks them to; all get its JSON result, or its CheckpointError."""

        def explained() -> Any:
            try:
                return action()
            except OSError as error:
                raise CheckpointError(self.explained(error)) from error

        return self.ranks.led(explained, CheckpointError, _STOPPED, lambda task: self._verify_share(**task))

    def explained(self, error: OSError) -> str:
        """Says what the disk refused."""
        return f"{error.filename or self.root}: {error.strerror}"


def _needs_plan(everyone: list[dict[str, Any]]) -> bool:
    """ValueError where a rank cannot save or saves something else."""
    for rank, one in enumerate(everyone):
        if one["error"]:
            raise ValueError(one["error"] if len(everyone) == 1 else f"rank {rank}: {one['error']}")
        if one["name"] != everyone[0]["name"]:
            raise ValueError(f"rank {rank} saves {one['name']}, rank 0 saves {everyone[0]['name']}")
    return not all(one["known"] for one in everyone)


def share(entries: Mapping[str, Entry], rank: int, count: int) -> set[str]:
    """The files that a rank reads when all verify: the largest first, to whom has least."""
    load, assigned = [0] * count, set()
    for path, entry in sorted(entries.items(), key=lambda item: (-item[1].size_bytes, item[0])):
        reader = min(range(count), key=lambda candidate: (load[candidate], candidate))
        load[reader] += entry.size_bytes
        if reader == rank:
            assigned.add(path)
    return assigned


def verified(folder: Path, rank: int, count: int) -> dict[str, Any]:
    """Verifies this rank's share; its findings, as JSON."""
    try:
        manifest.verify(folder, share(manifest.read(folder), rank, count))
    except Damaged as damage:
        return {"damaged": str(damage)}
    except CheckpointError as error:
        return {"refused": str(error)}
    except OSError as error:
        return {"os": _refusal(error, folder)}
    return {}


def judge(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raises what `manifest.verify` would have raised for the findings of all ranks."""
    for report in reports:
        if "os" in report:
            raise OSError(*report["os"])
        if "damaged" in report:
            raise Damaged(report["damaged"])
        if "refused" in report:
            raise CheckpointError(report["refused"])


def _refusal(error: OSError, where: Path) -> list[Any]:
    """The arguments that recreate an OSError."""
    return [error.errno, error.strerror or str(error), str(error.filename or where)]


def _wait_for(folder: Path, entries: Mapping[str, Entry]) -> None:
    """OSError unless this process, too, sees the files of all ranks: on a network a moment may pass."""
    deadline = time.monotonic() + _APPEARS_SECONDS
    for path, entry in entries.items():
        while (seen := _size(folder / path)) != entry.size_bytes:
            if time.monotonic() > deadline:
                raise OSError(
                    errno.ENOENT,
                    f"another rank wrote {entry.size_bytes} bytes, but rank 0 sees {seen}: output_dir must be a "
                    "folder that all nodes share",
                    str(folder / path),
                )
            time.sleep(0.05)


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
