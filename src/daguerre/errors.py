"""What a user can cause and mend, the exit codes of the command line, and the command that installs what is missing.

A UserError is shown as its text alone, without a traceback. Whatever else comes up, every other ValueError included, is
a fault of the program or of the machine: its traceback goes into a file.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from daguerre.credentials import scrub

DONE = 0
FAILED = 1
REFUSED = 2
HELD = 3
LOST = 4
STUCK = 5
INTERRUPTED = 130
PREEMPTED = 138
TERMINATED = 143

EXIT_CODES = {
    DONE: "done (a finished run that is started again, too)",
    FAILED: "the run failed, or a fault in the program or the machine",
    REFUSED: "what was asked for cannot be done: the message says why and what to do",
    HELD: "another process works in the run folder, or packs into the same one",
    LOST: "another process of the run failed or is gone; the log names it first",
    STUCK: "no process of the run got any further; the log names the rank, stacks/ holds where each one stood",
    INTERRUPTED: "stopped by Ctrl-C; a run that was training has saved and will go on from there",
    PREEMPTED: "stopped by SIGUSR1 (the time of a job is up), likewise",
    TERMINATED: "stopped by SIGTERM, likewise",
}


class UserError(ValueError):
    """Something the user gave cannot be used. The message says what, what is allowed and what to do, and holds none of
    the secrets that an address in it may have had."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(scrub(each) if isinstance(each, str) else each for each in args))

    exit_code = REFUSED
    """What the command line exits with."""


class Absent(UserError):
    """Something that is not on this machine could not be fetched. What it would be used for can be described still."""


class ProcessLost(UserError):
    """A process that helps this one has ended: killed, or by a fault of which it told itself."""

    exit_code = FAILED


class SaidElsewhere(UserError):
    """An error that another process of the run tells: this one leaves with its exit code, silently."""

    def __init__(self, error: UserError) -> None:
        super().__init__(str(error))
        self.exit_code = error.exit_code


def install(*packages: str) -> str:
    """The command that installs packages for the Python that runs this, in the versions of constraints.txt where this
    is a clone. The packages themselves, as Daguerre is published on no index where pip would find its extras."""
    constraints = Path(__file__).resolve().parents[2] / "constraints.txt"
    tested = ["-c", str(constraints)] if constraints.is_file() else []
    return shlex.join([sys.executable, "-m", "pip", "install", *tested, *packages])
