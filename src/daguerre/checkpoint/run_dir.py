"""The folder of a run: where each thing lies, who holds it, and what its status is.

Holds no training and no torch, so that `daguerre report` or a launcher can ask in a moment. The checkpoints inside
are `store.py`'s.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from daguerre import documents, regular, system
from daguerre.checkpoint.atomic import make_folder, write_json_atomically
from daguerre.errors import HELD, UserError
from daguerre.fresh import FULL

State = Literal["running", "saved", "finished", "failed"]

EXPORTS = ("pipeline", "adapter")
"""Folders of a run that are replaced whole at each save."""
ELSEWHERE = ".held-elsewhere.json"
"""In a copy of a run's folder: the process that works at the run itself."""
_PATIENCE_SECONDS = 0.3

_locks: set[int] = set()
"""Open lock files of this process. A forked child (a loader's worker) closes its copies at once: otherwise an orphan
would keep the run locked after its parent was killed."""


class RunFolderError(UserError):
    """The run folder cannot be used; the message says why and what to do."""


class RunFolderInUse(RunFolderError):
    """Another process works in this run folder; the message names it."""

    exit_code = HELD
    code = "in_use"


@dataclass(frozen=True)
class Holder:
    """The process that holds a run folder."""

    pid: int
    host: str
    since: str
    """ISO time with its offset from UTC."""

    @classmethod
    def this_process(cls) -> Holder:
        return cls(os.getpid(), socket.gethostname(), now())

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})" if self.pid else "another process"


@dataclass(frozen=True)
class _Inside:
    """A path below the folder of a run."""

    name: str

    def __get__(self, run: RunFolder, kind: type | None = None) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run. Nothing is created before `hold`."""

    path: Path

    checkpoints = _Inside("checkpoints")
    """Folder of the store."""
    config = _Inside("config.yaml")
    """The resolved recipe."""
    environment = _Inside("environment.json")
    """Versions and hardware of the last start."""
    status = _Inside("status.json")
    """Written by `write_status`."""
    metrics = _Inside("metrics/metrics.jsonl")
    """One JSON object a line."""
    log = _Inside("log.txt")
    """Messages of training, each with its time (UTC); starts follow each other."""
    profile = _Inside("profile")
    """Folder of traces of single updates."""
    samples = _Inside("samples")
    """Folder of the sample images, one folder a save."""
    pipeline = _Inside("pipeline")
    """Folder of the newest export of a whole model, in diffusers' format."""
    adapter = _Inside("adapter")
    """Folder of the newest export of what adapters have added."""
    data = _Inside("data.json")
    """The source, and what it skipped."""
    captions = _Inside("captions.digests")
    """Digests of the captions that are trained on, to name those that change."""
    skipped = _Inside("skipped.jsonl")
    """A line for each sample that could not be used as it is."""
    evaluation = _Inside("evaluation.json")
    """Results of the metrics."""
    evaluations = _Inside("evaluations")
    """Folder of what `daguerre evaluate` measures, a folder for each checkpoint and protocol. Training writes there
    which of them its trackers got, and nothing else."""
    actions = _Inside("actions")
    """Folder of what is asked of the run while it trains, a file each until the run has taken it."""
    answers = _Inside("answers")
    """Folder of the answers to these."""
    report = _Inside("report.html")
    """The page about the run."""
    lock = _Inside(".lock")
    """Locked while a process works here; its text names that process."""

    def samples_of(self, step: int) -> Path:
        """The folder of the sample images of a save."""
        return self.samples / f"step-{step:08d}"

    @contextmanager
    def hold(self) -> Iterator[RunFolder]:
        """Keep every other process out while the block runs; creates the folder.

        RunFolderHeld, at once, if another process is in. The lock is the kernel's (flock), so it ends with the
        process however that dies. RunFolderError if the folder cannot be written to.
        """
        try:
            make_folder(self.path)
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RunFolderError(_unwritable(self.path, error)) from error
        _locks.add(descriptor)
        try:
            self._lock(descriptor)
            _sign(descriptor)
            yield self
            os.ftruncate(descriptor, 0)
        finally:
            _locks.discard(descriptor)
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        # A short patience: `lock_holder` in another process takes the lock for a moment.
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not _try_lock(descriptor, self.path):
            if time.monotonic() > deadline:
                raise RunFolderInUse(in_use(self.path, _signature(descriptor)))
            time.sleep(0.02)

    def write_status(
        self,
        state: State,
        *,
        step: int,
        samples: int,
        total_steps: int | None = None,
        reason: str = "",
        since: str = "",
    ) -> None:
        """Replace status.json. `reason` says why a run failed, stopped early or makes no update, `since` from when on.
        RunFolderError for a full disk."""
        document = {"state": state, "reason": reason, "step": step, "samples": samples, "total_steps": total_steps}
        document |= {"pid": os.getpid(), "host": socket.gethostname(), "updated": now()}
        document |= {"since": since} if since else {}
        try:
            write_json_atomically(self.status, document)
        except OSError as error:
            raise RunFolderError(_unwritable(self.status, error)) from error

    def check_not_moved(self) -> None:
        """RunFolderError if the folder that this process holds is no longer where it was."""
        if not self.lock.exists():
            raise RunFolderError(
                f"{self.path} no longer exists: it was renamed, moved or deleted while this run was using it. Move "
                "the folder back and run the same command again, or continue with `daguerre train NEW-FOLDER`"
            )

    def read_status(self) -> dict[str, Any] | None:
        """The last status; None before the first, and for a damaged file, which the next start replaces. `running`
        that nobody holds (`lock_holder`) means: was killed."""
        try:
            return documents.read_object(self.status)
        except (FileNotFoundError, ValueError):
            return None


def lock_holder(path: Path) -> Holder | None:
    """The process that works in a run folder now, or None. Pid 0 if it has not signed yet."""
    try:
        descriptor = os.open(RunFolder(path).lock, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return _elsewhere(path)
    try:
        if _try_lock(descriptor, path, shared=True):
            return None
        return _signature(descriptor)
    finally:
        os.close(descriptor)


def _elsewhere(path: Path) -> Holder | None:
    """Of a copy: who worked at the run when it was copied."""
    try:
        return Holder(**documents.parse(regular.content(path / ELSEWHERE)))
    except (OSError, ValueError, TypeError):
        return None


def check_not_held(path: Path) -> None:
    """RunFolderHeld, naming the process, if one works in the run folder: a first look before anything is loaded."""
    if holder := lock_holder(path):
        raise RunFolderInUse(in_use(path, holder))


def _try_lock(descriptor: int, path: Path, shared: bool = False) -> bool:
    try:
        return system.try_lock(descriptor, shared)
    except OSError as error:
        raise RunFolderError(
            f"cannot lock {path}: {error.strerror}. Its file system does not support locks, so two runs could "
            "overwrite each other: choose an output_dir on another file system"
        ) from error


def _sign(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(Holder.this_process())).encode(), 0)


def _signature(descriptor: int) -> Holder:
    try:
        return Holder(**documents.parse(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):
        return Holder(0, "", "")


def in_use(where: object, holder: Holder) -> str:
    """Message for a person whose run another process holds."""
    return (
        f"{where} is in use by {holder}. Wait for it or stop it (it saves and exits on Ctrl-C or SIGTERM), "
        "or give this run another run_name"
    )


def now() -> str:
    """This moment as files of a run have it: ISO 8601, with the offset of this machine."""
    return datetime.now(UTC).astimezone().isoformat(timespec="seconds")


def _unwritable(path: Path, error: OSError) -> str:
    if error.errno in FULL:
        return f"cannot write to {path}: {error.strerror}. Free some space or choose another output_dir"
    return f"cannot write to {path}: {error.strerror}. Choose an output_dir that you may write to"


def _close_locks_in_child() -> None:
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)
