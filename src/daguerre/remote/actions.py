"""Actions that are asked of a run (checkpoint/actions.py), wherever it lives: in a folder here, or in an object store.

In a store `ask` creates an object, and a thread of the run brings it into the run's working folder, from where it is
taken as any other; the answer goes the way of all files of the run. The lock of the run says of whom it is asked.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from daguerre import documents, threads
from daguerre.checkpoint import actions
from daguerre.checkpoint.actions import EXPIRES_SECONDS, Answer, Kind
from daguerre.checkpoint.atomic import make_folder, write_bytes_atomically
from daguerre.checkpoint.run_dir import RunFolder, lock_holder
from daguerre.errors import UserError
from daguerre.remote import lock
from daguerre.remote.errors import explained
from daguerre.storage.address import is_remote
from daguerre.storage.bucket import Prefix, prefix
from daguerre.storage.errors import Missing, StoreError

POLL_SECONDS = 10.0
"""Between two looks of a run into its store."""


def ask(run: str, kind: Kind, values: dict[str, Any] | None = None, seconds: float = EXPIRES_SECONDS) -> str:
    """Asks the process that works at a run, a folder or an address; the ID of the action. UserError for nobody."""
    if not is_remote(run):
        return actions.ask(_folder(run), kind, values, seconds)
    far, ident = prefix(run.rstrip("/")), actions.new_id()
    with _explained():
        data = actions.written(far.name, lock.holder(far), kind, values, seconds)
        far.write(f"actions/{ident}.json", data)
    return ident


def answer(run: str, ident: str) -> Answer | None:
    """The answer to an action; None while it is not there. UserError for a file that is no answer."""
    if not is_remote(run):
        return actions.answer(_folder(run), ident)
    try:
        with _explained():
            data, _ = prefix(run.rstrip("/")).read(f"answers/{actions.checked_id(ident)}.json")
    except Missing:
        return None
    return actions.answered(ident, lambda: documents.parse(data))


def withdraw(run: str, ident: str) -> bool:
    """Takes an action back; False if the run has claimed it already."""
    if not is_remote(run):
        return actions.withdraw(_folder(run), ident)
    far, name = prefix(run.rstrip("/")), f"actions/{actions.checked_id(ident)}.json"
    with _explained():
        there = any(one.name == name for one in far.listing("actions/"))
        far.delete([name])
    return there


def wait(run: str, ident: str, seconds: float = EXPIRES_SECONDS) -> Answer:
    """Waits for the answer, and takes the action back if the run has not claimed it after so many seconds. UserError if
    it was taken back, or if the run has ended without an answer."""
    patience, deadline = (5.0 if is_remote(run) else 0.2), time.monotonic() + seconds
    while (found := answer(run, ident)) is None:
        if not _is_held(run) and answer(run, ident) is None:
            raise UserError(f"{run} has ended without an answer; what it has saved is in its folder", code="failed")
        if time.monotonic() > deadline and withdraw(run, ident):
            raise UserError(
                f"{run} did not take it within {seconds:.0f} s, and it was taken back: a run looks between two "
                "updates, not while it starts, saves or evaluates",
                code="failed",
            )
        time.sleep(patience)
    return found


def _is_held(run: str) -> bool:
    if not is_remote(run):
        return lock_holder(Path(run).expanduser()) is not None
    with _explained():
        return lock.holder(prefix(run.rstrip("/"))) is not None


def fetching(run: Prefix, folder: RunFolder, say: Callable[[str], None]) -> AbstractContextManager[None]:
    """Brings what is asked into the working folder while the block runs."""
    return threads.background("run-actions", partial(_watch, run, folder, say))


def fetch(run: Prefix, folder: RunFolder) -> None:
    """Moves what is asked now into the working folder. StoreError, OSError."""
    for one in run.listing("actions/"):
        name = one.name.removeprefix("actions/")
        # A kill after the first of these two brings it again to the next start of the run, which refuses it.
        if actions.is_asked(name) and one.bytes <= actions.MOST_BYTES:
            make_folder(folder.actions)
            write_bytes_atomically(folder.actions / name, run.read(one.name)[0])
        run.delete([one.name])


def _watch(run: Prefix, folder: RunFolder, say: Callable[[str], None], over: Event) -> None:
    failing = False
    while not over.wait(POLL_SECONDS):
        try:
            fetch(run, folder)
            failing = False
        except (OSError, UserError) as error:
            if not failing:
                say(f"actions that are asked of {run.name} cannot be read now: {explained(error)}")
            failing = True


def _folder(run: str) -> RunFolder:
    folder = RunFolder(Path(run).expanduser())
    if not folder.path.is_dir():
        raise UserError(f"{run} is not a folder: give the folder of a run, such as runs/quickstart", code="missing")
    return folder


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except Missing:
        raise
    except StoreError as error:
        raise UserError(error.explanation, code="unreachable") from error
