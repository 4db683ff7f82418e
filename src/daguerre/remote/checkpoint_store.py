"""Checkpoints of a run that lives in an object store: the methods of `ShardedStore`, for ranks that share no disk.

Each rank sends its own files from memory; rank 0 sends the rest and then the manifest, conditionally: only then is it
saved. What is loaded comes into a local folder first, every file verified, once a machine. Every method is a
collective call but `names`.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from daguerre.checkpoint.manifest import CheckpointError, Damaged, Entry
from daguerre.checkpoint.ranks import Ranks
from daguerre.checkpoint.retention import Keep
from daguerre.checkpoint.run_dir import RunFolderError
from daguerre.checkpoint.safetensors import encode
from daguerre.checkpoint.sharded import Own, Planned, ShardedStore
from daguerre.checkpoint.shards import Groups
from daguerre.checkpoint.store import Found
from daguerre.remote import checkpoint_catalog
from daguerre.remote.checkpoint_catalog import Shelf
from daguerre.storage.bucket import Prefix
from daguerre.storage.errors import StoreError


def _nothing() -> None:
    return None


@dataclass
class RemoteStore:
    """The checkpoints of the run at `run`; what is loaded lies below `root`, on this machine."""

    root: Path
    ranks: Ranks
    run: Prefix
    before_commit: Callable[[], None] = _nothing
    """Called on rank 0 before a manifest is written: sends what has to be there first, and refuses where another run
    has taken this one's place."""
    _shelf: Shelf = field(init=False, repr=False)
    _planner: ShardedStore = field(init=False, repr=False)
    _loaded: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self._shelf = Shelf(self.run / "checkpoints")
        self._planner = ShardedStore(self.root, self.ranks)

    def names(self) -> list[str]:
        """Names of the checkpoints that exist, verified or not, oldest first; no collective call. CheckpointError."""
        return _asked(self._shelf.names)

    def plan(
        self, name: str, groups: Groups, documents: Mapping[str, Any], files: Mapping[str, bytes] | None = None
    ) -> Planned:
        """`ShardedStore.plan`."""
        return self._planner.plan(name, groups, documents, files)

    def commit(self, planned: Planned, own: Own | None = None) -> Path:
        """Send a planned save; when this returns, it is in the store. The path is where it would be loaded to.

        CheckpointError, the same on every rank, if the store refuses any of them: nothing of the new one stays,
        earlier ones are untouched. RanksGone as in `ShardedStore.commit`. RunFolderHeld, on rank 0, where another run
        has taken the place.
        """
        if self._loaded:  # long since in memory
            shutil.rmtree(self.root, ignore_errors=True)
            self._loaded = False
        bundle = self._shelf.bundle(planned.name)
        attempt = self._together(bundle.attempt)
        reports = self.ranks.collect(self._sent(planned, attempt, planned.own if own is None else own))
        self._together(lambda: self._finished(planned, attempt, reports))
        return self.root / planned.name

    def recover(self) -> Found:
        """The newest checkpoint that verifies, brought to this machine; what a killed save left behind goes.

        Damaged ones that are newer are set aside: their manifest goes to `checkpoints/quarantine/`, their files stay.
        """
        notices = self._together(self._shelf.tidy)
        return self._newest(notices, self._shelf.quarantine)

    def rewind(self, name: str) -> Found:
        """`recover` to the checkpoint `name`: newer ones are set aside, as the run will make them again.

        CheckpointError if there is none of this name, or if it is damaged; then nothing is changed.
        """
        notices, names = self._together(lambda: [self._shelf.tidy(), self._shelf.names()])
        if name not in names:
            there = ", ".join(names) or "none"
            raise CheckpointError(f"there is no checkpoint {name!r} in {self.run.name}; there are: {there}")
        if damage := self._fetched(name):
            raise Damaged(damage)
        reason, newer = f"the run went on from {name}, which is older", names[names.index(name) + 1 :]
        notices += self._together(lambda: [self._shelf.quarantine(one, reason) for one in newer])
        return Found(self.root / name, notices)

    def newest_verified(self) -> Found:
        """The newest checkpoint that verifies, brought to this machine; changes nothing in the store."""
        return self._newest([], lambda name, damage: f"{damage}; {name} is passed over")

    def purge(self, keep: Keep) -> list[str]:
        """Delete all but the newest verified checkpoints and the backups; returns notices.

        Verified here: the store has every file as it was when it was sent, by its size and entity tag.
        """
        notices: list[str] = self._together(lambda: self._shelf.purge(keep))
        return notices

    def _newest(self, notices: list[str], aside: Callable[[str, str], str]) -> Found:
        for name in reversed(self._together(self._shelf.names)):
            if (damage := self._fetched(name)) is None:
                return Found(self.root / name, notices)
            notices.append(self._together(partial(aside, name, damage)))
        return Found(None, notices)

    def _fetched(self, name: str) -> str | None:
        """Brings a checkpoint to every machine; how it is damaged, if it is. CheckpointError where it cannot be had."""
        reader = self._together(lambda: secrets.token_hex(8))
        self._loaded = True
        found: dict[str, Any] = {}
        try:
            self._shelf.bundle(name).bring(self.root / name, reader, self.ranks.rank)
        except Damaged as damage:
            found = {"damaged": str(damage)}
        except CheckpointError as error:
            found = {"refused": str(error)}
        except OSError as error:
            found = {"refused": checkpoint_catalog.unreadable(self.root / name, error)}
        reports = self.ranks.collect(found)
        verdict = self._together(lambda: _judged(reports))
        return verdict and str(verdict)

    def _sent(self, planned: Planned, attempt: str, own: Own) -> dict[str, Any]:
        """This rank's files, in the store: sizes, digests and tags, or why not."""
        files, tags, at = {}, {}, self._shelf.bundle(planned.name).at
        try:
            for file, tensors in own.items():
                sent = at.send(f"{attempt}/{file}", partial(encode, tensors), planned.own_bytes)
                files[file], tags[file] = [sent.size_bytes, sent.sha256], sent.tag
        except OSError as error:
            return {"error": checkpoint_catalog.told(error)}
        return {"files": files, "tags": tags}

    def _finished(self, planned: Planned, attempt: str, reports: list[dict[str, Any]]) -> None:
        """What only rank 0 does."""
        bundle = self._shelf.bundle(planned.name)
        try:
            for rank, report in enumerate(reports):
                if "error" in report:
                    raise CheckpointError(self._refusal(planned, f"{report['error']}{_of(rank, self.ranks.count)}"))
            entries = planned.entries(reports)
            tags = {file: tag for report in reports for file, tag in report["tags"].items()}
            for path, part in planned.beside().items():
                data = b"".join(part.chunks)
                sent = bundle.at.send(f"{attempt}/{path}", partial(list, [data]))
                entries[path], tags[path] = Entry(part.kind, sent.size_bytes, sent.sha256), sent.tag
            self.before_commit()
            bundle.seal(attempt, entries, tags)
        except (StoreError, CheckpointError, RunFolderError) as error:
            self._shelf.give_up(bundle, attempt)
            if isinstance(error, StoreError):
                raise CheckpointError(self._refusal(planned, error.told)) from error
            raise

    def _refusal(self, planned: Planned, what: str) -> str:
        try:
            earlier = self._shelf.names()
        except StoreError:
            state = "Earlier ones are untouched"
        else:
            state = f"Earlier ones are untouched, the newest is {earlier[-1]}" if earlier else "There is no earlier one"
        return f"cannot save {planned.name}: {what}. {state}"

    def _together(self, action: Callable[[], Any]) -> Any:
        """Rank 0 acts; all get its JSON result, or its CheckpointError."""
        return self.ranks.led(lambda: _asked(action))


def _asked(action: Callable[[], Any]) -> Any:
    """A store's refusal is a CheckpointError."""
    try:
        return action()
    except StoreError as error:
        raise CheckpointError(error.told) from error


def _judged(reports: list[dict[str, Any]]) -> str | None:
    """How the checkpoint is damaged, if it is. CheckpointError where a rank could not read it."""
    for report in reports:
        if "refused" in report:
            raise CheckpointError(report["refused"])
    return next((report["damaged"] for report in reports if "damaged" in report), None)


def _of(rank: int, count: int) -> str:
    return f" (rank {rank})" if count > 1 else ""
