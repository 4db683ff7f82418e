"""The folder that a list of images is generated into: the first request there holds for all who go on with it."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daguerre import __version__, documents, system
from daguerre.checkpoint.atomic import make_folder, sync_folder, to_json
from daguerre.errors import Held, UserError
from daguerre.fresh import naming
from daguerre.generation.jobs import TaskShard

NAME = "request.json"
_PARTS = 1 << 20


@dataclass(frozen=True)
class Folder:
    """A folder of images, there or not."""

    path: Path

    def parameters(self) -> dict[str, Any] | None:
        """The request of its images; None if nothing was begun. UserError for a folder of other things."""
        if not self.path.exists():
            return None
        try:
            return dict(documents.read_object(self.path / NAME)["asked"])
        except FileNotFoundError:
            # A request that another process is about to begin does not count.
            if self.path.is_dir() and all(path.name.startswith(f".{NAME}.") for path in self.path.iterdir()):
                return None
            raise UserError(
                f"{self.path} exists and holds no {NAME} of `generate`: images are never mixed with other files; "
                "choose another folder with out=FOLDER",
                code="conflict",
                setting="out",
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.path / NAME} is damaged ({error}): choose another folder, or remove it", code="damaged"
            ) from error

    def continues(self, parameters: Mapping[str, Any]) -> bool:
        """True if the same request was begun here. UserError shows what is requested otherwise now."""
        before = self.parameters()
        if before is None:
            return False
        if changes := differences(before, parameters):
            lines = "\n".join(f"  {line}" for line in changes)
            raise UserError(
                f"{self.path} holds images of another request:\n{lines}\nRepeat the earlier request to continue it, "
                "or choose another folder with out=FOLDER",
                code="changed",
            )
        return True

    def begin(self, parameters: Mapping[str, Any]) -> None:
        """Creates the folder and records the request in it. Of several processes at once, one does."""
        make_folder(self.path)
        temporary = self.path / f".{NAME}.{os.getpid()}.tmp"
        try:
            with naming(self.path / NAME):
                temporary.write_bytes(to_json({"made_by": f"daguerre {__version__}", "asked": dict(parameters)}))
            try:
                os.link(temporary, self.path / NAME)
            except FileExistsError:
                pass
            except OSError:  # a file system without links
                temporary.replace(self.path / NAME)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(self.path)
        self.continues(parameters)

    @contextmanager
    def locked(self, part: TaskShard) -> Iterator[None]:
        """Keeps other processes from generating this part."""
        with (self.path / NAME).open("rb+") as file:
            start, length = (0, _PARTS) if part.count == 1 else (part.index, 1)
            if not system.try_lock_bytes(file.fileno(), start, length):
                raise Held(f"another process is writing to {self.path}: wait for it, or choose another folder")
            yield


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each entry that is not the same."""

    def shown(parameters: Mapping[str, Any], name: str) -> str:
        return json.dumps(parameters[name], ensure_ascii=False) if name in parameters else "(not given)"

    names = dict.fromkeys([*before, *now])
    return [
        f"{name}: {shown(before, name)} -> {shown(now, name)}" for name in names if before.get(name) != now.get(name)
    ]


def place(out: str | None, home: Path, name: str, parameters: Mapping[str, Any]) -> Folder:
    """The folder `out`; else one in `home`, named after the prompt: that of the same request, or a new one."""
    if out is not None and "://" in out:
        raise UserError(
            f"out={out}: images can only be written to a local folder; copy it afterwards",
            code="unsupported",
            setting="out",
        )
    if out is not None:
        given = Path(out).expanduser()
        if file := next((path for path in (given, *given.parents) if path.is_file()), None):
            raise UserError(
                f"out={out}: {file} is a file, and images go into a folder, with a JSON next to each: out=FOLDER",
                code="conflict",
                setting="out",
            )
        return Folder(given)
    slug = re.sub(r"\W+", "-", name.lower()).strip("-")[:60].strip("-") or "empty"
    number = 1
    while True:
        folder = Folder(home / (slug if number == 1 else f"{slug}-{number}"))
        with suppress(UserError):
            before = folder.parameters()
            if before is None or not differences(before, parameters):
                return folder
        number += 1
