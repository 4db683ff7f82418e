"""A queue of trainings for the devices of this machine: a folder with a file for each entry. No torch here.

A `Queue` adds, lists, moves, pauses and removes entries; queue/runner.py starts them. Nothing here remembers a state:
it is found, each time, from locks and from what processes have left.

    ID.json         the entry: the words of `daguerre train`, its place in the order, whether it is on hold (`Entry`)
    ID.lock         locked, as long as a process of the entry's present attempt lives: the kernel lets go with the last
    ID.begun.json   the attempt that has begun, and its processes; written before the training is started
    ID.ended.json   the attempt that has ended, and its exit code
    ID.log          what it printed
    .runner         locked by the one process that starts entries

An attempt that has not begun is begun by whichever runner comes next; one that has begun is never begun again, unless a
person resumes the entry, which is another attempt. So a runner may be killed at any moment.
"""

import json
import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from daguerre import documents, errors, system
from daguerre.checkpoint.actions import RELEASED
from daguerre.checkpoint.atomic import locked, make_folder, write_json_atomically
from daguerre.checkpoint.run_dir import RunFolder, lock_holder
from daguerre.errors import UserError
from daguerre.queue import processes
from daguerre.settings import ROOTS, Settings

State = Literal["waiting", "paused", "running", "finished", "stopped", "failed", "interrupted"]
"""paused: waits until it is resumed; stopped: saved and ended on request; interrupted: killed, or the machine went
down."""
OPEN: tuple[State, ...] = ("waiting", "paused", "running")
RUNNER = ".runner"
"""The file that the process which starts entries holds."""
_STOPPED = {errors.INTERRUPTED, errors.PREEMPTED, errors.TERMINATED}


class Entry(Settings):
    """A training that is to be made. Files of entries are written by this program alone; a forged one is no entry."""

    words: list[str] = Field(min_length=1)
    """Recipe and overrides, as `daguerre train` takes them."""
    folder: str
    """The folder in which the command was given, where relative paths start."""
    place: str
    """The run's folder or address."""
    works_in: str
    """The folder of this machine in which the run works: the same, or that of a run in a store."""
    devices: int = Field(1, ge=1)
    """Devices that it trains on together."""
    roots: list[str] = Field([])
    """Folders and addresses below which it reads and writes; anywhere without any."""
    order: float = Field(allow_inf_nan=False)
    """Its place: the lowest goes first."""
    added: float = Field(allow_inf_nan=False)
    """Unix time."""
    hold: bool = False
    """Not to be started until it is resumed."""
    attempt: int = Field(1, ge=1)
    """The number of the start that is asked for, or made."""
    stops: int = 0
    """How often the present attempt was asked to stop."""

    @property
    def is_far(self) -> bool:
        """True for a run in a store."""
        return self.place != self.works_in


@dataclass(frozen=True)
class Listed:
    """An entry as it is now."""

    ident: str
    entry: Entry
    state: State
    why: str
    """The reason of a state, for people; empty for most."""
    status: dict[str, Any]
    """The status of its run (status.json); {} before there is one."""
    log: Path
    """What it printed."""


@dataclass(frozen=True)
class Queue:
    """The entries in a folder."""

    path: Path

    def add(
        self,
        words: Sequence[str],
        place: str,
        works_in: Path,
        folder: Path,
        devices: int = 1,
        roots: Sequence[str] = (),
    ) -> str:
        """Adds a training behind all others; its ID. `place` and `works_in` are as config/place.py finds them for the
        words. UserError if one that has not ended works in the same place."""
        with self._edited():
            listed = self.entries()
            for other in listed:
                if other.entry.place == place and other.state in OPEN:
                    raise UserError(
                        f"{place} is in the queue already: {other.ident} is {other.state}. Give this run another "
                        "run_name, or remove that one",
                        code="conflict",
                    )
            ident = secrets.token_hex(4)
            order = max((other.entry.order for other in listed), default=0.0) + 1
            entry = Entry(
                words=list(words),
                folder=str(folder),
                place=place,
                works_in=str(works_in),
                devices=devices,
                roots=list(roots),
                order=order,
                added=time.time(),
            )
            self._write(ident, entry)
        return ident

    def entries(self) -> list[Listed]:
        """All entries in their order, with their states."""
        found = map(self.find, self._idents())
        return sorted((each for each in found if each is not None), key=lambda each: (each.entry.order, each.ident))

    def find(self, ident: str) -> Listed | None:
        """An entry; None where no entry has that name."""
        entry = self.read(ident)
        if entry is None:
            return None
        # In this order: once no process of the entry lives, its status is the last one.
        is_locked, status = self.is_locked(ident), self.status(entry)
        state, why = self._state(ident, entry, is_locked, status)
        return Listed(ident, entry, state, why, status, self.path / f"{ident}.log")

    def get(self, ident: str) -> Listed:
        """An entry by its ID, or the beginning of it. UserError for another ID."""
        known = self._idents()
        meant = [each for each in known if ident and each.startswith(ident)]
        found = self.find(meant[0]) if len(meant) == 1 else None
        if found is None:
            raise UserError(
                f"there is no entry {ident!r} in the queue; there are: {', '.join(known) or 'none'}", code="unknown"
            )
        return found

    def move(self, ident: str, where: Literal["first", "last"] | str) -> None:
        """Puts an entry first, last, or before another one."""
        with self._edited():
            own = self.get(ident)
            others = [each for each in self.entries() if each.ident != own.ident]
            places = [each.entry.order for each in others]
            if where in ("first", "last"):
                order = min(places, default=1.0) - 1 if where == "first" else max(places, default=-1.0) + 1
            else:
                at = [each.ident for each in others].index(self.get(where).ident) if where != own.ident else 0
                before = places[at - 1] if at else places[at] - 2
                order = (before + places[at]) / 2
            self._change(own.ident, order=order)

    def pause(self, ident: str) -> str:
        """Holds an entry back; one that trains saves, frees its device and ends. What is done, in words."""
        with self._edited():
            found = self.get(ident)
            if found.state not in ("waiting", "running"):
                raise UserError(f"{found.ident} is {found.state}: nothing is left to pause", code="unused")
            self._change(found.ident, hold=True)
        if found.state == "waiting":
            return "held back until it is resumed"
        self._signal(found, signal.SIGTERM)
        return "saves and frees its device, and waits until it is resumed"

    def resume(self, ident: str) -> None:
        """Lets an entry that is paused, stopped, failed or interrupted start, or go on where it was."""
        with self._edited():
            found = self.get(ident)
            if found.state in ("waiting", "running", "finished"):
                raise UserError(f"{found.ident} is {found.state}: there is nothing to resume", code="unused")
            begun = self.document(found.ident, "begun").get("attempt") == found.entry.attempt
            self._change(found.ident, hold=False, stops=0, attempt=found.entry.attempt + begun)

    def stop(self, ident: str) -> str:
        """Stops an entry that trains: the first time it saves and ends, the second time it is killed. What is done."""
        with self._edited():
            found = self.get(ident)
            if found.state != "running":
                raise UserError(f"{found.ident} is {found.state}, so it cannot be stopped", code="unused")
            self._change(found.ident, stops=found.entry.stops + 1)
        if found.entry.stops:
            self.kill(found)
            return "killed; what it saved before is there"
        self._signal(found, signal.SIGTERM)
        return "saves and ends; a second `stop` kills it"

    def kill(self, found: Listed) -> None:
        """Ends all processes of an entry."""
        self._signal(found, signal.SIGKILL)

    def remove(self, ident: str) -> None:
        """Takes an entry out; its run stays. UserError for one that trains."""
        with self._edited():
            found = self.get(ident)
            if found.state == "running":
                raise UserError(f"{found.ident} is running: `daguerre queue stop {found.ident}` first", code="conflict")
            for path in self.path.glob(f"{found.ident}.*"):  # the entry itself last: without it the others are nothing
                if path.suffixes != [".json"]:
                    path.unlink(missing_ok=True)
            (self.path / f"{found.ident}.json").unlink(missing_ok=True)

    @property
    def is_paused(self) -> bool:
        """True while no entry is started."""
        return (self.path / "paused").exists()

    def pause_all(self, paused: bool) -> None:
        """Starts no more entries, or starts them again; those that train go on."""
        make_folder(self.path)
        if paused:
            (self.path / "paused").touch()
        else:
            (self.path / "paused").unlink(missing_ok=True)

    def read(self, ident: str) -> Entry | None:
        """The file of an entry; None for none, and for a file that is no entry."""
        try:
            return Entry.model_validate(documents.read_object(self.path / f"{ident}.json"))
        except (OSError, ValueError, ValidationError):
            return None

    def document(self, ident: str, kind: str) -> dict[str, Any]:
        """ID.KIND.json, which processes of the entry have left; {} without it, and for a damaged one."""
        try:
            return documents.read_object(self.path / f"{ident}.{kind}.json")
        except (OSError, ValueError):
            return {}

    def status(self, entry: Entry) -> dict[str, Any]:
        """The status of the run, of which a far one works in a folder of this machine."""
        return RunFolder(Path(entry.works_in)).read_status() or {}

    def is_locked(self, ident: str) -> bool:
        """True while a process of the entry lives."""
        return _is_locked(self.path / f"{ident}.lock")

    @property
    def is_run(self) -> bool:
        """True while a process starts entries."""
        return _is_locked(self.path / RUNNER)

    def _idents(self) -> list[str]:
        return sorted(path.stem for path in self.path.glob("????????.json"))

    def _state(self, ident: str, entry: Entry, is_locked: bool, status: dict[str, Any]) -> tuple[State, str]:
        if is_locked:
            return "running", "asked to stop" if entry.stops else str(status.get("reason") or "")
        return self.outcome(ident, entry, status)

    def outcome(self, ident: str, entry: Entry, status: dict[str, Any]) -> tuple[State, str]:
        """State and reason of an entry that has no process."""
        begun, ended = self.document(ident, "begun"), self.document(ident, "ended")
        if begun.get("attempt") != entry.attempt:
            return ("paused", "") if entry.hold else ("waiting", "")
        own = status.get("pid") == begun.get("training")
        code = ended.get("code") if ended.get("attempt") == entry.attempt else None
        if code == errors.DONE or (code is None and own and status.get("state") == "finished"):
            return "finished", ""
        reason = str(status.get("reason") or "") if own else ""
        saved = code in _STOPPED or (code is None and own and status.get("state") == "saved")
        if saved or ((entry.hold or entry.stops) and (code is None or code < 0)):
            if entry.hold or reason == RELEASED:
                return "paused", "its device is free"
            return "stopped", "killed" if entry.stops > 1 else reason
        if code is None or code < 0:
            return "interrupted", "its process was killed, or the machine went down"
        return "failed", reason or f"exit code {code}: the log says why"

    def _signal(self, found: Listed, number: signal.Signals) -> None:
        """To the training; a SIGKILL to all of its processes."""
        begun = self.document(found.ident, "begun")
        if "training" not in begun and (holder := lock_holder(Path(found.entry.works_in))):
            begun["training"] = holder.pid  # its keeper was killed before it could write it
        for name in ("training", "keeper") if number == signal.SIGKILL else ("training",):
            processes.send(begun.get(name), begun.get(f"{name}_started"), number)

    def _change(self, ident: str, **values: Any) -> None:
        entry = self.read(ident)
        if entry is not None:
            self._write(ident, entry.model_copy(update=values))

    def _write(self, ident: str, entry: Entry) -> None:
        write_json_atomically(self.path / f"{ident}.json", entry.model_dump())

    @contextmanager
    def _edited(self) -> Iterator[None]:
        """One process at a time changes entries."""
        make_folder(self.path)
        with locked(self.path / ".edits"):
            yield


def bound(roots: Sequence[str]) -> dict[str, str]:
    """The environment of a process whose recipe reads and writes below folders alone; nothing without any."""
    return {ROOTS: json.dumps(list(roots))} if roots else {}


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that whoever looks does not keep others from looking.
        return not system.try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)


def usual_folder() -> Path:
    """The queue of this user on this machine: in $XDG_STATE_HOME or ~/.local/state."""
    given = os.environ.get("XDG_STATE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state") / "daguerre" / "queue"
