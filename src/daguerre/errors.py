"""Errors that a user can cause and mend, the exit codes of the command line, and the pip command for missing packages.

A UserError is shown as its text alone, without a traceback. Whatever else comes up, every other ValueError included, is
a fault of the program or of the machine: its traceback goes into a file.
"""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

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
    DONE: "done (also when a finished run is started again)",
    FAILED: "the run failed, or an internal error",
    REFUSED: "the request cannot be carried out: the message says why and what to do",
    HELD: "another process is using the run folder or the output folder",
    LOST: "another process of the run failed or disappeared; the log names it first",
    STUCK: "the run was stuck; the log names the rank, and stacks/ has the stack trace of every process",
    INTERRUPTED: "stopped by Ctrl-C or `daguerre control`; a training run has saved and continues when started again",
    PREEMPTED: "stopped by SIGUSR1 (time limit of a job), same as above",
    TERMINATED: "stopped by SIGTERM, same as above",
}


Code = Literal[
    "invalid",  # a value, a command or a line of a file that is not allowed
    "unknown",  # a name that does not exist
    "missing",  # something that must be given, or a file that is not there
    "conflict",  # things that cannot be combined
    "unused",  # a setting that would have no effect
    "damaged",  # a file that cannot be read, or has not the digest that was noted
    "changed",  # not what the run, checkpoint or index was made with
    "unsupported",  # this program, library, device or file system cannot do it
    "not_installed",  # an extra package is needed
    "unreachable",  # a service, a hub or another process does not answer
    "resources",  # not enough memory, disk or open files
    "in_use",  # another process holds it
    "empty",  # nothing is left to work on
    "failed",  # something went wrong on the way, through nobody's recipe
]
"""The kind of a refusal: stable, where the words of a message may change."""


class UserError(ValueError):
    """Something the user gave cannot be used. The message says what, what is allowed and what to do, and holds none of
    the secrets that an address in it may have had."""

    exit_code = REFUSED
    """The exit status of the command line."""
    code: Code = "invalid"
    setting: str | None = None
    """The dotted path of the setting to change, such as `data.path`; None for no setting, or more than one."""

    def __init__(self, message: str = "", *, code: Code | None = None, setting: str | None = None) -> None:
        super().__init__(scrub(message))
        self.code = code or self.code
        self.setting = setting


class Absent(UserError):
    """Something that is not on this machine could not be fetched. What it would be used for can be described still."""

    code = "unreachable"


class Held(UserError):
    """Another process works in the same place; the message names it."""

    exit_code = HELD
    code = "in_use"


class ProcessLost(UserError):
    """A helper process has exited: it was killed, or reported an error of its own."""

    exit_code = FAILED
    code = "failed"


class ReportedElsewhere(UserError):
    """An error that another process of the run tells: this one leaves with its exit code, silently."""

    def __init__(self, error: UserError) -> None:
        super().__init__(str(error), code=error.code, setting=error.setting)
        self.exit_code = error.exit_code


@contextmanager
def named(place: str) -> Iterator[None]:
    """Within the block a UserError begins with the file, folder or checkpoint that it is about."""
    try:
        yield
    except UserError as error:
        error.args = (scrub(f"{place}: {error}"),)
        raise


def install(*packages: str) -> str:
    """The command that installs packages for the Python that runs this, in the versions of constraints.txt where this
    is a clone. The packages themselves, as Daguerre is published on no index where pip would find its extras."""
    constraints = Path(__file__).resolve().parents[2] / "constraints.txt"
    tested = ["-c", str(constraints)] if constraints.is_file() else []
    return shlex.join([sys.executable, "-m", "pip", "install", *tested, *packages])
