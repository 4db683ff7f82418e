"""Commands that the page runs for a folder, in processes of their own, as they need torch: a recipe of the pictures
(`daguerre init`), and captions by a network (`daguerre caption`)."""

import os
import re
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import IO, Annotated, Any, Literal
from urllib.parse import urlencode

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from daguerre import documents, errors, plugins
from daguerre.config import recipe
from daguerre.errors import UserError
from daguerre.serve.bounds import within
from daguerre.serve.dataset.folders import Place
from daguerre.serve.dataset.uploads import safe_name

MOST_BYTES = 4096
_TAIL_BYTES = 16 << 10
_MOST = 2
"""Commands at a time."""
_BASE = re.compile(r", from the recipe (\w+); written by `daguerre init`")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DONE = re.compile(r"^([\d,]+) of ([\d,]+)$", re.MULTILINE)


def captioners() -> tuple[str, ...]:
    """The networks that write captions, by name."""
    return plugins.names("captioners")


def bases() -> list[str]:
    """The shipped recipes of a LoRA."""
    return sorted(name for name in recipe.shipped() if name.endswith("_lora"))


def start(home: Path, folder: Path, base: str, name: str) -> str:
    """The address of a new run by a shipped recipe on the pictures of a folder, from the page of that folder; its name
    is one that no folder of `home` has."""
    names = chain([name, f"{name}_run"], (f"{name}_run{number}" for number in count(2)))
    free = next(one for one in names if not (home / one).exists())
    own = {"data.source": "folder", "data.path": str(folder), "run_name": free}
    given = [("recipe", base), *(("set", f"{setting}={value}") for setting, value in own.items())]
    return f"../../queue/new?{urlencode(given)}"


class Recipe(BaseModel):
    """A recipe of the pictures."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["init"]
    name: str = Field(min_length=1, max_length=200)
    """Of the file, without its ending."""
    base: str = ""


class Plan(BaseModel):
    """The memory that the recipe which was made takes."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["plan"]


class Captions(BaseModel):
    """Captions for the pictures that have none."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["caption"]
    by: str
    path: str = Field("", max_length=1000)
    """Of its weights: a folder below the roots, or OWNER/NAME of the hub; empty: as they are published."""


class Stop(BaseModel):
    """The end of what runs."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["stop"]


class Wanted(BaseModel):
    """Message of a page."""

    wanted: Annotated[Recipe | Plan | Captions | Stop, Field(discriminator="kind")]


@dataclass
class Job:
    """A command that was started."""

    kind: str
    folder: Path
    process: subprocess.Popen[bytes]
    said: IO[bytes]
    made: Path | None = None
    """The file that it writes."""
    text: str = ""
    """The end of what it has said, once it has ended."""

    def state(self) -> dict[str, Any]:
        """The state, as the page shows it."""
        code = self.process.poll()
        text = self._tail()
        steps = _DONE.findall(text)
        share = [int(each.replace(",", "")) for each in steps[-1]] if steps else None
        document = {
            "kind": self.kind,
            "running": code is None,
            "done": code == errors.DONE,
            "share": share,
            "text": text,
        }
        if code == errors.DONE and self.made is not None and self.made.is_file():
            document |= self._recipe(self.made)
        return document

    def _recipe(self, made: Path) -> dict[str, str]:
        """The recipe that was made, and the address of a new run by its base on the same pictures."""
        text = made.read_text(encoding="utf-8", errors="replace")
        base = _BASE.search(text.replace("\n#   ", " "))  # long lines of the head are wrapped
        if base is None:
            return {"file": str(made), "recipe": text}
        return {"file": str(made), "recipe": text, "start": start(made.parent, self.folder, base[1], made.stem)}

    def _tail(self) -> str:
        if self.said.closed:
            return self.text
        ended = self.process.poll() is not None
        size = os.fstat(self.said.fileno()).st_size
        data = os.pread(self.said.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        text = data.decode("utf-8", "replace").replace("\r", "\n").strip()
        if ended:
            self.said.close()
            self.text = text
        return text


@dataclass
class Jobs:
    """The last command of each folder. Threads may call it."""

    roots: tuple[Path, ...]
    """Folders below which the page reads; in the first one recipes are written."""
    _of: dict[str, Job] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def state(self, place: Place) -> dict[str, Any] | None:
        """None for a folder without a command."""
        with self._lock:
            job = self._of.get(place.id)
            return None if job is None else job.state()

    def ask(self, place: Place, given: bytes) -> dict[str, Any]:
        """Starts or stops what a page asks for. UserError for something else, and while another one runs."""
        try:
            wanted = Wanted.model_validate({"wanted": documents.parse(given)}).wanted
        except (ValidationError, ValueError) as error:
            raise UserError("the page asked for no command") from error
        with self._lock:
            before = self._of.get(place.id)
            if isinstance(wanted, Stop):
                if before is not None and before.process.poll() is None:
                    before.process.terminate()
                return {}
            if before is not None and before.process.poll() is None:
                raise UserError("a command works on this folder already: wait for it, or stop it", code="in_use")
            if sum(job.process.poll() is None for job in self._of.values()) >= _MOST:
                raise UserError(f"{_MOST} commands run already: wait for one of them", code="in_use")
            self._of[place.id] = self._started(place, wanted, before)
        return {}

    def _started(self, place: Place, wanted: Recipe | Plan | Captions, before: Job | None) -> Job:
        made = None
        if isinstance(wanted, Captions):
            if wanted.by not in captioners():
                raise UserError(
                    f"there is no captioner {wanted.by}: there are {', '.join(captioners())}", code="unknown"
                )
            words = ["caption", str(place.path), f"with={wanted.by}", "write=txt"]
            words += [f"path={self._weights(wanted.path)}"] if wanted.path else []
        elif isinstance(wanted, Plan):
            made = before.made if before else None
            if made is None or not made.is_file():
                raise UserError("make a recipe first", code="missing")
            words = ["plan", str(made)]
        else:
            made = self.roots[0] / f"{safe_name(wanted.name).removesuffix('.yaml')}.yaml"
            words = ["init", str(place.path), "-o", str(made)]
            if wanted.base and wanted.base not in bases():
                raise UserError(f"there is no recipe {wanted.base}: there are {', '.join(bases())}", code="unknown")
            words += [f"base={wanted.base}"] if wanted.base else []
        said = tempfile.TemporaryFile()  # noqa: SIM115 closed when it is read to its end
        command = [sys.executable, "-m", "daguerre", *words]
        process = subprocess.Popen(
            command, cwd=self.roots[0], stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
        )
        return Job(wanted.kind, place.path, process, said, made)

    def _weights(self, text: str) -> str:
        """The place of a network. UserError for a folder that is not below the roots."""
        folder = self.roots[0] / Path(text).expanduser()
        if folder.is_dir() and within(folder, self.roots):
            return str(folder)
        if _HUB.fullmatch(text):
            return text
        raise UserError(
            f"there is no folder {text!r} below {', '.join(map(str, self.roots))}: give one, or OWNER/NAME of the hub",
            code="missing",
        )

    def end(self) -> None:
        """Stops what still runs: captions go on with the next start."""
        with self._lock:
            for job in self._of.values():
                if job.process.poll() is None:
                    job.process.terminate()
