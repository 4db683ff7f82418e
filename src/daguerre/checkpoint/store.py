"""The store of a run's checkpoints: what is saved is whole or absent, and is verified before it is used.

Commit protocol: write to a fresh temporary folder; sync each file; a manifest with the size and digest of each; sync
it and the folder; rename; sync the parent. Only then is a checkpoint "saved", and only then may older ones go.
Knows nothing of what the tensors mean. One process writes (the one that holds the run folder); others may read.
"""

import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daguerre.checkpoint import contents, manifest
from daguerre.checkpoint.atomic import make_folder, sync_folder
from daguerre.checkpoint.contents import Checkpoint
from daguerre.checkpoint.manifest import CheckpointError, Damaged
from daguerre.checkpoint.retention import RetentionPolicy

_NAME = re.compile(r"[a-z]+-(\d+)")
_TEMPORARY = ".tmp-"
_REPLACED = ".replaced-"


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that verified, or None, and notices about the others."""

    path: Path | None
    notices: list[str]


@dataclass
class Store:
    """Checkpoints in the folder `root`, which need not exist yet, as one process alone reads and keeps them.

    A name is a word and a number, `step-00001000`; a higher number is newer. Other names in the folder are left alone.
    """

    root: Path
    _known_sound: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def place(self) -> str:
        """Their folder, for people."""
        return str(self.root)

    def names(self) -> list[str]:
        """Names of the checkpoints that exist, verified or not, oldest first."""
        found = (entry.name for entry in self.root.iterdir()) if self.root.is_dir() else iter(())
        return sorted(filter(_NAME.fullmatch, found), key=_number)

    def temporary(self, name: str) -> Path:
        """A folder, not there yet, in which a checkpoint can be put together; `publish` gives it its name."""
        assert _NAME.fullmatch(name), name
        return self.root / f"{_TEMPORARY}{name}-{secrets.token_hex(4)}"

    def load(self, path: Path, only: Collection[str] | None = None) -> Checkpoint:
        """Read a checkpoint, every byte verified as it is read. Damaged (a CheckpointError) names a file that differs.

        `only` names the groups of tensors to read (`("ema",)`); the others are neither read nor verified.
        """
        return contents.read(path, only)

    def groups(self, path: Path) -> list[str]:
        """Names of the groups of tensors that a checkpoint holds. Damaged."""
        return contents.groups(path)

    def read_all(self, path: Path) -> None:
        """Verifies every file of a checkpoint. Damaged."""
        manifest.verify(path)

    def newest_verified(self) -> Found:
        """The newest checkpoint whose every file is as it was saved. For readers: changes nothing on disk."""
        notices: list[str] = []
        for name in reversed(self.names()):
            try:
                return Found(self._verified(name), notices + self._extras(name))
            except Damaged as damage:
                notices.append(f"{damage}; {name} is skipped")
        return Found(None, notices)

    def recover(self) -> Found:
        """`newest_verified` for the process that holds the run: also clears what a killed one left behind.

        Temporary folders are removed, a replacement that was cut short is undone, and damaged checkpoints that are
        newer than the one found go to `quarantine`. No checkpoint is ever deleted here.
        """
        with self._clearing():
            notices = self._collect_garbage()
            for name in reversed(self.names()):
                if (notice := self._quarantine_if_damaged(name)) is None:
                    return Found(self.root / name, notices + self._extras(name))
                notices.append(notice)
        return Found(None, notices)

    def rewind(self, name: str) -> Found:
        """`recover` to the checkpoint `name`: newer ones go to `quarantine`, as the run will make them again.

        CheckpointError if no checkpoint has this name, or if it is damaged; then nothing is moved.
        """
        with self._clearing():
            notices = self._collect_garbage()
            if name not in self.names():
                there = ", ".join(self.names()) or "none"
                raise CheckpointError(f"there is no checkpoint {name!r} in {self.place}; there are: {there}")
            path = self._verified(name)
            newer = self.names()[self.names().index(name) + 1 :]
            notices += [self._quarantine(one, f"the run continued from {name}, which is older") for one in newer]
        return Found(path, notices + self._extras(name))

    def purge(self, keep: RetentionPolicy) -> list[str]:
        """Delete all but the newest verified checkpoints and the backups; returns notices.

        A damaged one does not count and goes to `quarantine`. One that this process saved or verified counts as
        verified while no file of it has changed its size or time of change.
        """
        notices: list[str] = []
        named = {_number(name)[0]: name for name in self.names()}

        def sound(number: int) -> bool:
            if notice := self._quarantine_if_damaged(named[number]):
                notices.append(notice)
            return not notice

        with self._clearing():
            for number in keep.deletable(list(named), sound):
                self._delete(named[number])
        return notices

    def publish(self, temporary: Path, name: str) -> Path:
        """Give a finished folder its name; when this returns, it survives a power cut. OSError.

        `_undo_replacements` mends a kill between the two renames.
        """
        final, replaced = self.root / name, self.root / f"{_REPLACED}{name}"
        if final.exists() and self._quarantine_if_damaged(name) is None:
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(final, replaced)
        try:
            os.rename(temporary, final)
        except OSError:
            if replaced.exists():
                os.rename(replaced, final)
            raise
        sync_folder(self.root)
        if replaced.exists():
            self._remove(replaced)
        self._known_sound[name] = _stamp(final)
        return final

    def _collect_garbage(self) -> list[str]:
        """Removes what a killed process left behind, undoes what it had begun; notices."""
        return [*self._undo_replacements(), *self._remove_temporaries()]

    def _undo_replacements(self) -> list[str]:
        notices = []
        for replaced in sorted(self.root.glob(f"{_REPLACED}*")):
            name = replaced.name.removeprefix(_REPLACED)
            if (self.root / name).exists() and (notice := self._quarantine_if_damaged(name)):
                notices.append(notice)
            if (self.root / name).exists():
                self._remove(replaced)
            else:
                os.rename(replaced, self.root / name)
                sync_folder(self.root)
                notices.append(f"{name} was being replaced when its run was killed; it is restored")
        return notices

    def _remove_temporaries(self) -> list[str]:
        stale = sorted(self.root.glob(f"{_TEMPORARY}*"))
        for folder in stale:
            shutil.rmtree(folder)
        return [f"removed {folder.name}, left over from a killed run" for folder in stale]

    def _quarantine_if_damaged(self, name: str) -> str | None:
        """None for a sound checkpoint; else it is moved aside and the notice says why and where to."""
        try:
            self._verified(name)
            return None
        except Damaged as damage:
            return self._quarantine(name, damage)

    def _quarantine(self, name: str, reason: Damaged | str) -> str:
        aside = self.root / "quarantine" / name
        number = 2
        while aside.exists():
            aside, number = aside.with_name(f"{name}.{number}"), number + 1
        make_folder(aside.parent)
        os.rename(self.root / name, aside)
        sync_folder(aside.parent)
        sync_folder(self.root)
        with suppress(OSError):
            aside.with_name(f"{aside.name}.txt").write_text(f"{reason}\n", encoding="utf-8")
        return f"{reason}; {name} is moved to {aside}"

    def _verified(self, name: str) -> Path:
        path = self.root / name
        if self._known_sound.get(name) != (stamp := _stamp(path)):
            self._known_sound.pop(name, None)
            try:
                self.read_all(path)
            except OSError as error:
                raise CheckpointError(
                    f"cannot read {error.filename or path}: {error.strerror}. This may be temporary: nothing was "
                    f"changed, so run the same command again. If it persists, check the disk, or move {path} away to "
                    "continue from the previous checkpoint"
                ) from error
            self._known_sound[name] = stamp
        return path

    def _extras(self, name: str) -> list[str]:
        strangers = manifest.extras(self.root / name)
        return [f"{name} also holds {', '.join(strangers)}, which it did not save: ignored"] if strangers else []

    def _delete(self, name: str) -> None:
        # Renamed first, so that half a checkpoint never stands under a checkpoint's name.
        aside = self.root / f"{_TEMPORARY}purged-{name}"
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(self.root / name, aside)
        self._known_sound.pop(name, None)
        self._remove(aside)

    def _remove(self, folder: Path) -> None:
        sync_folder(self.root)
        shutil.rmtree(folder)

    @contextmanager
    def _clearing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot delete old checkpoints: {error.filename or self.root}: {error.strerror}. None is partly "
                f"deleted; make {self.root} writable, and run the same command again"
            ) from error

    def refusal(self, name: str, error: OSError, needed: int) -> str:
        """Message for a disk that refused a save of so many bytes; the temporary folder is already gone."""
        space = ""
        if self.root.is_dir():
            space = f" ({needed / 1e6:.1f} MB are needed, {shutil.disk_usage(self.root).free / 1e6:.1f} MB are free)"
        earlier = self.names()
        state = f"Earlier ones are untouched, the newest is {earlier[-1]}" if earlier else "There is no earlier one"
        return (
            f"cannot save {name}: {error.filename or self.root}: {error.strerror}{space}. {state}. Free some space or "
            "choose another output_dir, then run the same command again"
        )


def _number(name: str) -> tuple[int, str]:
    match = _NAME.fullmatch(name)
    assert match, name
    return int(match[1]), name


def _stamp(path: Path) -> list[tuple[str, int, int]]:
    """Path, size and time of change (of content or inode) of every file: equal stamps mean nobody wrote since."""
    files = ((file, file.stat()) for file in path.rglob("*") if file.is_file())
    return sorted((str(file), stat.st_size, stat.st_ctime_ns) for file, stat in files)
