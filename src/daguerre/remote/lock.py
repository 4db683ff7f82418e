"""One run at a time in a place in an object store: an object that its holder writes again and again.

The object is created, refreshed and taken over by conditional writes, so the store decides between two that come at
once. A lock that was not refreshed for `STALE_SECONDS` by the store's own clock, or whose process is known to be dead
on this machine, may be taken over; its old holder, if it wakes up, finds that out before its next checkpoint counts.
"""

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from daguerre import documents, system, threads
from daguerre.checkpoint.run_dir import Holder, RunFolderError, RunFolderInUse, in_use
from daguerre.storage.bucket import Prefix, Version
from daguerre.storage.errors import Missing, StoreError

NAME = ".lock"
REFRESH_SECONDS = 20.0
"""Between two writes of the lock."""
STALE_SECONDS = 120.0
"""A lock that old belongs to nobody any more."""
MISSED_SECONDS = 45.0
"""A lock that old was not written when it should have been."""
_LOOK_SECONDS = 2.0
_PROBE = ".lock-clock"


@dataclass
class Lock:
    """The lock of a run; not held yet."""

    run: Prefix
    say: Callable[[str], None]
    """Tells a person what becomes of it."""
    _token: str = field(default_factory=lambda: secrets.token_hex(8), init=False)
    own: Holder = field(default_factory=Holder.this_process, init=False)
    """The process that takes it, as others read it."""
    _version: Version | None = field(default=None, init=False)
    _lost: str = field(default="", init=False)
    _busy: threading.Lock = field(default_factory=threading.Lock, init=False)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other runs out while the block runs. RunFolderHeld, naming who is in; StoreError."""
        self._take()
        try:
            with threads.background("run-lock", self._keep):
                yield
        finally:
            self.release()

    def confirm(self) -> None:
        """RunFolderHeld unless the lock is ours now; asks the store."""
        self._refresh()
        if self._lost:
            raise RunFolderInUse(self._lost)

    def _content(self) -> bytes:
        document = {"token": self._token, **asdict(self.own), **_process(self.own.pid)}
        return json.dumps({**document, "write": secrets.token_hex(4)}).encode()

    def _take(self) -> None:
        self._version = self.run.create(NAME, self._content())
        while self._version is None:
            try:
                data, version = self.run.read(NAME)
            except Missing:  # let go at this moment
                self._version = self.run.create(NAME, self._content())
                continue
            holder = _document(data)
            reason = "its process is dead" if _is_dead(holder) else self._stale(holder)
            self._version = self.run.replace(NAME, self._content(), version)
            if self._version is not None:
                self.say(f"took over {self.run.name} from {_holder(holder)}: {reason}")
            elif (there := _document(self._now())) and there.get("token") != holder.get("token"):
                raise RunFolderInUse(_held(self.run, _holder(there)))
        self._try_conditions()

    def _try_conditions(self) -> None:
        """RunFolderError for a store that writes whatever the condition: it would let two runs in."""
        first = self._version
        assert first is not None
        self._refresh()
        if self.run.create(NAME, self._content()) or self.run.replace(NAME, self._content(), first):
            self.run.delete([NAME])
            raise RunFolderError(
                f"{self.run.name} is in a store that ignores the conditions of writes (If-None-Match, If-Match), so "
                "two runs could overwrite each other: set output_dir to another store or a local folder"
            )

    def _now(self) -> bytes:
        with suppress(Missing):
            return self.run.read(NAME)[0]
        return b"{}"

    def _stale(self, holder: dict[str, Any]) -> str:
        """The reason why the lock may be taken over, by the store's clock. RunFolderHeld if it may not.

        One that its holder has missed to write is waited for, and any by a job that SLURM started again: a run that
        goes on elsewhere must not give up here.
        """
        age, announced = age_seconds(self.run), False
        if age <= MISSED_SECONDS and not _is_requeued():
            raise RunFolderInUse(_held(self.run, _holder(holder)))
        while age <= STALE_SECONDS:
            if not announced:
                announced = True
                self.say(
                    f"{self.run.name} is in use by {_holder(holder)}, last seen {age:.0f} s ago: this run takes over "
                    f"if that reaches {STALE_SECONDS:.0f} s"
                )
            time.sleep(_LOOK_SECONDS)
            before, age = age, age_seconds(self.run)
            if age < before:  # written meanwhile, or let go
                if _document(self._now()):
                    raise RunFolderInUse(_held(self.run, _holder(holder)))
                return "it released the lock"
        return f"it was last seen {age:.0f} s ago"

    def _keep(self, over: threading.Event) -> None:
        heard, announced = time.monotonic(), False
        while not over.wait(REFRESH_SECONDS) and not self._lost:
            try:
                self._refresh()
                heard, announced = time.monotonic(), False
            except StoreError as error:
                if time.monotonic() - heard > STALE_SECONDS / 2 and not announced:
                    announced = True
                    self.say(
                        f"the lock of the run cannot be refreshed, so another run may take over: {error.explanation}"
                    )

    def _refresh(self) -> None:
        with self._busy:
            if self._lost:
                return
            assert self._version is not None
            version = self.run.replace(NAME, self._content(), self._version)
            if version is not None:
                self._version = version
                return
            self._recover()

    def _recover(self) -> None:
        """An unknown version: an answer of ours that was lost, a lock that somebody removed, or another holder."""
        try:
            data, version = self.run.read(NAME)
        except Missing:
            version = self.run.create(NAME, self._content())  # type: ignore[assignment]
            self._version = version
            data = self._now() if version is None else b""
        if data and _document(data).get("token") != self._token:
            self._lost = (
                f"{self.run.name} was taken over by {_holder(_document(data))}, because this run did not refresh its "
                f"lock for {STALE_SECONDS:.0f} s: this run stops, and the other one is not affected"
            )
            self.say(self._lost)
        else:
            self._version = version

    def release(self) -> None:
        """Lets go; also in a process that is about to end without leaving `held`."""
        with suppress(StoreError):
            if not self._lost and _document(self._now()).get("token") == self._token:
                self.run.delete([NAME])


def holder(run: Prefix) -> Holder | None:
    """The process that works there now; None for nobody, and for one that is dead or missed to write. StoreError."""
    try:
        found = _document(run.read(NAME)[0])
    except Missing:
        return None
    if _is_dead(found) or age_seconds(run) > MISSED_SECONDS:
        return None
    return _holder(found)


def living(data: bytes) -> Holder | None:
    """The process that wrote a lock; None for one of this machine that has ended, and for what is no lock."""
    found = _document(data)
    try:
        return None if not found or _is_dead(found) else _holder(found)
    except (TypeError, ValueError, OverflowError):  # forged
        return None


def check_not_held(run: Prefix) -> None:
    """RunFolderHeld, naming the process, if one works there: a first look before anything is loaded. StoreError."""
    if (found := holder(run)) and not _is_requeued():
        raise RunFolderInUse(_held(run, found))


def age_seconds(run: Prefix) -> float:
    """Age of the lock in seconds, by the store's clock; 0 without a lock."""
    name = f"{_PROBE}-{secrets.token_hex(4)}"
    try:
        written = run.changed(NAME)
        run.write(name, b"what time is it?")
        return (run.changed(name) - written).total_seconds()
    except Missing:
        return 0.0
    finally:
        with suppress(StoreError):
            run.delete([name])


def _document(data: bytes) -> dict[str, Any]:
    try:
        found = documents.parse(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _process(pid: int) -> dict[str, str]:
    """Identity of a process on Linux: kernel, process namespace, start. Empty elsewhere."""
    found, boot = system.process(pid), system.boot()
    if found is None or not boot:
        return {}
    try:
        return {"boot": boot, "namespace": os.readlink("/proc/self/ns/pid"), **found._asdict()}
    except OSError:
        return {}


def _is_dead(holder: dict[str, Any]) -> bool:
    """True if it is a process of this machine that has ended; False if that cannot be known."""
    here = _process(os.getpid())
    if not here or any(holder.get(name) != here[name] for name in ("boot", "namespace")):
        return False
    pid = int(holder.get("pid", 0))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's
        return False
    there = system.process(pid)
    return there is not None and (there.started != holder.get("started") or there.state in system.ENDED)


def _is_requeued() -> bool:
    """True if SLURM started this job before: the holder of the lock is most likely what was left of that."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def _holder(found: dict[str, Any]) -> Holder:
    return Holder(int(found.get("pid", 0)), str(found.get("host", "")), str(found.get("since", "")))


def _held(run: Prefix, holder: Holder) -> str:
    return (
        f"{in_use(run.name, holder)}. If that process no longer exists, wait {STALE_SECONDS:.0f} s: then this run "
        "can take over"
    )
