"""Actions that a person asks of a run while it trains: a file for each in the run's folder, and a file with the answer.

`ask` writes `actions/ID.json` and gives the ID; `answer` reads `answers/ID.json`, which is there once the run has done
it, or refused it in words. The run looks between updates (`Inbox`), claims each file by renaming it, and takes it only
if it was asked of this start of the run and has not expired; so nothing is done twice, or by the next run. An ID begins
with the time, so that files sort as they were asked. Of a run in an object store: remote/actions.py. No torch here.

What each kind does is in run/control.py, docs/control.md tells it to users:

    save      a checkpoint, with the images and the export of every save
    sample    images with prompts and settings of sampling of its own (`values`), into samples/asked/ID
    evaluate  the loss on held-out samples, and the metric of the source
    change    other prompts and settings of sampling (`values`) from here on
    pause     no update until `continue`; the model stays in memory, and the other actions work
    stop      saves and ends, as Ctrl-C does
    release   the same, as a pause: the queue starts it again when it is asked to go on
"""

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, ValidationError

from daguerre import documents
from daguerre.checkpoint.atomic import make_folder, write_bytes_atomically, write_json_atomically
from daguerre.checkpoint.run_dir import Holder, RunFolder, lock_holder
from daguerre.errors import UserError
from daguerre.settings import Settings, Unused

Kind = Literal["save", "sample", "evaluate", "change", "pause", "continue", "stop", "release"]
KINDS: tuple[Kind, ...] = get_args(Kind)
WITH_VALUES: tuple[Kind, ...] = ("sample", "change")
"""Kinds to which settings of sampling belong."""
ENDS: tuple[Kind, ...] = ("stop", "release")
"""Kinds that end the process."""
PAUSED = "paused"
"""The reason in the status of a run that is paused; `since` says from when."""
STOPPED, RELEASED = "stopped on request", "released on request"
"""Reasons in the status of a run that has ended so."""
EXPIRES_SECONDS = 600.0
"""An action that a run has not taken by then is not done any more."""
LOOK_SECONDS = 1.0
"""Between two looks of a run."""
MOST_BYTES = 64 << 10
"""A larger file is no action."""
_MOST_WAITING = 100
_ID = re.compile(r"[0-9]{20}-[0-9a-f]{8}")
_ASKED, _TAKEN = ".json", ".taken"


class Action(Settings):
    """The content of a file that asks for something."""

    kind: Kind
    """The action."""
    values: dict[str, Any] = Field({})
    """Settings by name, such as {"prompts": ["a cat"]}; of `sample` and `change` alone."""
    expires: float = Field(allow_inf_nan=False)
    """Unix time from which it is not done any more."""
    pid: int
    """The start of the run that it was asked of: process, host and time, as the lock has them."""
    host: str
    """See `pid`."""
    since: str
    """See `pid`."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("values",), lambda own: own.kind not in WITH_VALUES, "only sample and change have values"),
    )


class Answer(Settings):
    """The content of a file that answers."""

    kind: str
    """The action; empty for a file that was not taken as one."""
    state: Literal["done", "refused"]
    """Refused is also what could not be done; the reason says why."""
    reason: str
    """What was done, or why it was not, for people."""
    step: int | None = None
    """Updates that the run had made."""
    files: str = ""
    """A folder below the run's with what was made, such as samples/asked/ID."""


@dataclass(frozen=True)
class Asked:
    """An action that the run has claimed."""

    ident: str
    action: Action


def ask(run: RunFolder, kind: Kind, values: dict[str, Any] | None = None, seconds: float = EXPIRES_SECONDS) -> str:
    """Asks the process that works in a run's folder; the ID of the action. UserError where nobody works there."""
    holder = lock_holder(run.path)
    data = written(str(run.path), holder, kind, values, seconds)
    ident = new_id()
    make_folder(run.actions)
    write_bytes_atomically(run.actions / f"{ident}.json", data)
    return ident


def written(name: str, holder: Holder | None, kind: Kind, values: dict[str, Any] | None, seconds: float) -> bytes:
    """The file of an action for the process that holds the run `name`. UserError for nobody, or for too much text."""
    if holder is None:
        raise UserError(
            f"{name} is not being trained now, so nothing can be asked of it: `daguerre train` continues it, "
            "`daguerre generate` and `daguerre evaluate` work with what it has saved",
            code="missing",
        )
    own = {"kind": kind, "expires": time.time() + seconds, **asdict(holder), **({"values": values} if values else {})}
    data = Action.model_validate(own).model_dump_json(indent=1).encode()
    if len(data) > MOST_BYTES:
        raise UserError(f"an action of {len(data):,} bytes is too long: {MOST_BYTES:,} are the most")
    return data


def new_id() -> str:
    """An ID that no other action has, later than all before."""
    return f"{time.time_ns():020d}-{secrets.token_hex(4)}"


def withdraw(run: RunFolder, ident: str) -> bool:
    """Takes an action back; False if the run has claimed it already."""
    try:
        (run.actions / f"{checked_id(ident)}.json").unlink()
    except OSError:
        return False
    return True


def answer(run: RunFolder, ident: str) -> Answer | None:
    """The answer to an action; None while it is not there. UserError for a file that is no answer."""
    path = run.answers / f"{checked_id(ident)}.json"
    try:
        return answered(ident, lambda: documents.read_object(path))
    except FileNotFoundError:
        return None


def answered(ident: str, read: Callable[[], Any]) -> Answer:
    """The answer of the JSON document that is read. UserError for one that is no answer."""
    try:
        return Answer.model_validate(read())
    except ValueError as error:
        raise UserError(f"the answer to {ident} cannot be read: {error}", code="damaged") from error


def is_asked(name: str) -> bool:
    """True of the name of a file that asks."""
    ident, ending = os.path.splitext(name)
    return ending == _ASKED and bool(_ID.fullmatch(ident))


def checked_id(ident: str) -> str:
    """The same text. UserError for one that is no ID, which is a name of a file."""
    if not _ID.fullmatch(ident):
        raise UserError(f"{ident!r} is not the ID of an action")
    return ident


@dataclass
class Inbox:
    """The actions that are asked of this process, which holds the run; it never raises for what files hold."""

    run: RunFolder
    holder: Holder
    """This start of the run, as its lock has it."""
    tell: Callable[[str], None]
    """Shows a person what cannot be answered."""
    _next: float = field(default=0.0, init=False)
    _told: bool = field(default=False, init=False)
    _seen: set[str] = field(default_factory=set, init=False)

    def take(self) -> list[Asked]:
        """Claims what is new, oldest first; looks once in `LOOK_SECONDS`. Refuses by itself what is no action, has
        expired, or was asked of an earlier start."""
        if time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + LOOK_SECONDS
        try:
            # No link: a folder of somebody else is not looked into.
            folder = os.open(self.run.actions, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return []
        except OSError as error:
            return self._tell_once(error)
        try:
            names = sorted(name for name in os.listdir(folder) if self._is_new(name))
            claimed = [found for name in names[:_MOST_WAITING] if (found := self._claim(folder, name)) is not None]
        except OSError as error:
            return self._tell_once(error)
        finally:
            os.close(folder)
        return claimed

    def answer(self, asked: Asked, done: bool, reason: str, step: int | None = None, files: str = "") -> None:
        """Answers an action that was taken, and forgets it."""
        state: Literal["done", "refused"] = "done" if done else "refused"
        self._answer(asked.ident, Answer(kind=asked.action.kind, state=state, reason=reason, step=step, files=files))

    def refuse_all(self, reason: str) -> None:
        """Refuses what waits: at the end of a run."""
        self._next = 0.0
        for asked in self.take():
            self.answer(asked, False, reason)

    def _is_new(self, name: str) -> bool:
        """True of a file that asks; temporary ones of writers begin with a dot, which is no ID."""
        ident, ending = os.path.splitext(name)
        return ending in (_ASKED, _TAKEN) and bool(_ID.fullmatch(ident)) and ident not in self._seen

    def _claim(self, folder: int, name: str) -> Asked | None:
        ident, ending = os.path.splitext(name)
        self._seen.add(ident)
        try:
            if ending == _TAKEN:  # this start has claimed none of them: an earlier one has, and ended
                raise UserError("the run ended before this was done; ask again")
            os.rename(name, ident + _TAKEN, src_dir_fd=folder, dst_dir_fd=folder)
            return Asked(ident, self._action(folder, ident + _TAKEN))
        except FileNotFoundError:  # taken back
            return None
        except UserError as error:
            self._answer(ident, Answer(kind="", state="refused", reason=str(error)))
            return None

    def _action(self, folder: int, name: str) -> Action:
        """The content of a claimed file. UserError for one that is not to be done."""
        try:
            action = Action.model_validate(documents.parse(_read(folder, name)))
        except ValidationError as error:
            raise UserError(f"the file is not an action: {documents.first_fault(error)}") from error
        except (OSError, ValueError) as error:
            raise UserError(f"the file is not an action: {getattr(error, 'strerror', None) or error}") from error
        if Holder(action.pid, action.host, action.since) != self.holder:
            raise UserError(f"{action.kind}: it was asked of an earlier start of this run; ask again")
        if action.expires < time.time():
            raise UserError(f"{action.kind}: it expired before the run could take it; ask again")
        return action

    def _answer(self, ident: str, answer: Answer) -> None:
        try:
            make_folder(self.run.answers)
            write_json_atomically(self.run.answers / f"{ident}.json", answer.model_dump())
            with suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                (self.run.actions / (ident + _TAKEN)).unlink()
        except OSError as error:
            self._tell_once(error)

    def _tell_once(self, error: OSError) -> list[Asked]:
        if not self._told:
            self._told = True
            self.tell(f"actions cannot be read or answered in {self.run.path}: {error.strerror}")
        return []


def _read(folder: int, name: str) -> bytes:
    """A small plain file. OSError for a link, a folder or a device, and for one that is too large."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file")
        if found.st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, more than {MOST_BYTES:,}")
        return os.read(descriptor, MOST_BYTES)
    finally:
        os.close(descriptor)
