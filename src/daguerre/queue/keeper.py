"""The process that keeps one training of the queue: starts it, writes that it has begun and how it ended, and ends what
does not end. `python -m daguerre.queue.keeper QUEUE ID ATTEMPT PROGRAM ...`, started by queue/runner.py alone.

Keeper and training inherit the locked file of the entry, so that its device counts as taken while one of them lives.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from daguerre import webhook
from daguerre.checkpoint.atomic import write_json_atomically
from daguerre.queue import processes
from daguerre.queue.queue import Entry, Queue, bound

END_SECONDS = 20.0
"""A training that has written its end lives no longer than this."""
FAR_END_SECONDS = 600.0
"""The same where its last files go to a store."""
TOLD = "told"
"""Says in ID.begun.json whether the end of an attempt was sent to the webhook."""
_LOOK_SECONDS = 0.5
_ENDS = ("finished", "failed", "saved")


def keep(queue: Queue, ident: str, attempt: int, program: list[str], lock: int) -> int:
    """Runs one attempt of an entry to its end; the exit code of the training."""
    entry = queue.read(ident)
    if entry is None or entry.attempt != attempt or entry.hold:  # removed or paused meanwhile
        return 0
    me = os.getpid()
    begun = {"attempt": attempt, "keeper": me, "keeper_started": processes.started(me), "begun": time.time()}
    begun |= {TOLD: False}
    # Before the training is there: whatever happens from here on, nobody starts this attempt again.
    write_json_atomically(queue.path / f"{ident}.begun.json", begun)
    command = [*program, *arguments(entry)]
    environment = {**os.environ, **bound(entry.roots)}
    environment.pop(webhook.VARIABLE, None)  # its end is told here, also that of one that is killed
    training = subprocess.Popen(command, cwd=entry.folder, stdin=subprocess.DEVNULL, start_new_session=True,
                                pass_fds=(lock,), env=environment)  # fmt: skip
    own = {"training": training.pid, "training_started": processes.started(training.pid)}
    write_json_atomically(queue.path / f"{ident}.begun.json", {**begun, **own})
    now = queue.read(ident) or entry
    if now.hold or now.stops:  # asked for before anybody could know whom to signal
        training.terminate()
    code = _wait(entry, queue, training)
    with suppress(ProcessLookupError, PermissionError):  # workers that have outlived it
        os.killpg(training.pid, signal.SIGKILL)
    write_json_atomically(queue.path / f"{ident}.ended.json", {"attempt": attempt, "code": code, "ended": time.time()})
    tell_end(queue, ident)
    return 0


def tell_end(queue: Queue, ident: str) -> None:
    """Tells the webhook how an attempt has ended, once; for its keeper, and for the runner that finds one
    that no process holds and of which its keeper, killed itself, has said nothing."""
    entry, begun = queue.read(ident), queue.document(ident, "begun")
    # Attempts of versions that did not write it were told of, or never will be.
    if entry is None or begun.get("attempt") != entry.attempt or begun.get(TOLD) is not False:
        return
    write_json_atomically(queue.path / f"{ident}.begun.json", {**begun, TOLD: True})  # first: a full disk tells once
    status = queue.status(entry)
    state, why = queue.outcome(ident, entry, status)
    known: dict[str, Any] = status if status.get("pid") == begun.get("training") else {}
    if said := webhook.tell(Path(entry.place), state, why, known.get("step"), known.get("total_steps")):
        print(f"daguerre: {said}", file=sys.stderr, flush=True)


def arguments(entry: Entry) -> list[str]:
    """The words of the command line of an entry."""
    if entry.devices == 1:
        return ["train", *entry.words]
    return ["launch", "local", *entry.words, f"processes={entry.devices}"]


def _wait(entry: Entry, queue: Queue, training: subprocess.Popen[bytes]) -> int:
    """The exit code, once the training has ended, or was killed for staying after its end."""
    patience, ended_at = (FAR_END_SECONDS if entry.is_far else END_SECONDS), None
    before = run_status(queue, entry)
    while True:
        with suppress(subprocess.TimeoutExpired):
            return training.wait(_LOOK_SECONDS)
        status = run_status(queue, entry)
        has_ended = status != before and status[0] in _ENDS
        ended_at = (ended_at or time.monotonic()) if has_ended else None
        if ended_at is not None and time.monotonic() - ended_at > patience:
            print(f"daguerre: it has written {status[0]!r} and does not end: killed", file=sys.stderr, flush=True)
            with suppress(ProcessLookupError):
                os.killpg(training.pid, signal.SIGKILL)
            training.wait()
            return {"finished": 0, "saved": 128 + signal.SIGTERM}.get(status[0], 1)


def run_status(queue: Queue, entry: Entry) -> tuple[str, int, str]:
    """State, process and time of the run's status."""
    found = queue.status(entry)
    return str(found.get("state", "")), int(found.get("pid") or 0), str(found.get("updated", ""))


def main() -> None:
    """Of the process that the runner starts; the last words are the program."""
    path, ident, attempt, lock, *program = sys.argv[1:]
    sys.exit(keep(Queue(Path(path)), ident, int(attempt), program, int(lock)))


if __name__ == "__main__":
    main()
