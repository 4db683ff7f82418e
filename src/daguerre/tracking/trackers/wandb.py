"""Weights & Biases, by its own package."""

import math
import netrc
import os
import secrets
import shutil
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np

from daguerre import documents
from daguerre.checkpoint.atomic import write_json_atomically
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.errors import UserError, install
from daguerre.tracking.settings import TrackerSettings
from daguerre.tracking.sinks import RESERVED
from daguerre.tracking.tracker import EarlierImage, TrackedRun

IDENTITY = "wandb.json"
"""File in the run folder with the id of the run at Weights & Biases."""
_EVALUATION, _AXIS = "evaluation/", "evaluation/step"
"""Numbers of a checkpoint that may come when training has gone on, and the step that they are of."""
_FLUSH_SECONDS = 1.0
"""A killed process loses the numbers of this time; the default is 15 s."""
_FINISH_SECONDS = 50.0
_WRITTEN_SECONDS = 5.0
"""After this time numbers are in the file of an offline run."""


class Settings(TrackerSettings):
    """Weights & Biases. Its key comes from the environment: WANDB_API_KEY, or what `wandb login` has stored."""

    name: Literal["wandb"] = "wandb"
    """Name of this tracker."""
    project: str | None = None
    """Project that shows the run; null for WANDB_PROJECT, else the account's project for runs without one."""
    entity: str | None = None
    """User or team that owns the project; null for WANDB_ENTITY, else the account's default."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """online: numbers are sent as they come; offline: they are written to the folder wandb/ of the run, for `wandb
    sync`; disabled: nothing is written; null for WANDB_MODE, else online."""

    @property
    def active(self) -> bool:
        return self.chosen_mode != "disabled"

    @property
    def chosen_mode(self) -> str:
        """The mode, or the environment's."""
        return self.mode or os.environ.get("WANDB_MODE") or "online"


def check(settings: Settings) -> None:
    """UserError without the package, and without a key where numbers are to be sent."""
    package = find_spec("wandb")
    if package is None or package.origin is None:  # the folder wandb/ of a run looks like a package
        raise UserError(
            f"logging.trackers has wandb, which is not installed: {install('wandb')}, or leave it out, such as "
            "logging.trackers=[tensorboard]",
            code="not_installed",
            setting="logging.trackers",
        )
    if settings.chosen_mode == "online" and not _has_key():
        raise UserError(
            "logging.trackers has wandb, and there is no key for it: set the environment variable WANDB_API_KEY, or "
            "set logging.trackers.wandb.mode=offline to send the numbers later",
            code="missing",
            setting="logging.trackers.wandb.mode",
        )


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    # Loading it takes a second.
    import wandb

    host = urlsplit(os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url).hostname or ""
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        with suppress(OSError, netrc.NetrcParseError):
            if path and netrc.netrc(Path(path).expanduser()).authenticators(host):
                return True
    return False


class Wandb:
    """A run at Weights & Biases whose steps are updates.

    A run that goes on keeps its id. The server knows the last step that it has: what is missing there is sent from
    the history, and no step is sent twice. An offline file knows nothing of earlier ones, and where two files of one
    id are sent, the later replaces the earlier: so each start writes the whole history into its own file, and then
    removes the older ones.
    """

    def __init__(self, settings: Settings, run: TrackedRun) -> None:
        import wandb

        identity, self._folder = _identity(run.folder), RunFolder(run.folder)
        self._image = wandb.Image
        self._older = sorted((run.folder / "wandb").glob(f"offline-run-*-{identity}"))
        self._run: Any = wandb.init(
            project=settings.project,
            entity=settings.entity,
            mode=settings.mode,
            name=run.name,
            id=identity,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            settings=wandb.Settings(
                allow_val_change=True,  # a run may go on with other settings
                console="off",
                silent=True,
                finish_timeout=_FINISH_SECONDS,
                x_transaction_log_flush_interval=_FLUSH_SECONDS,
                symlink=False,
                # Command lines, host names and the state of git may hold secrets; environment.json has what matters.
                x_disable_meta=True,
                disable_git=True,
                save_code=False,
                x_save_requirements=False,
            ),
        )
        self._run.define_metric(f"{_EVALUATION}*", step_metric=_AXIS)
        self._replayed_at = math.inf
        self._late, self._late_row = deque[dict[str, float]](), -1
        self._replay(run)
        self._replayed_at = time.monotonic()
        run.say(f"wandb: {self._run.url or f'offline; `wandb sync {Path(self._run.dir).parent}` sends it'}")

    def write(self, step: int, samples: int, values: Mapping[str, float]) -> None:
        """Adds the values to the row of `step`; those of an evaluation, which may come late, to the present row, or to
        a later one where that has some already, as a row has each name once."""
        late = {name: value for name, value in values.items() if name.startswith(_EVALUATION)}
        if step >= self._run.step and (now := {name: v for name, v in values.items() if name not in late}):
            self._run.log({"samples": samples, **now}, step=step)
        if late:
            self._late.append({**late, _AXIS: step})
        self._add_late(max(step, self._run.step))
        if time.monotonic() > self._replayed_at + _WRITTEN_SECONDS:
            self._remove_older()

    def show(self, step: int, name: str, pixels_HWC: np.ndarray, text: str) -> None:
        """Adds the image with its text to the row of `step`."""
        self._show(step, name, pixels_HWC, text)

    def close(self) -> None:
        """Ends the run there, as failed if it has. What cannot be sent within some seconds stays in its file, for
        `wandb sync`."""
        while self._late:
            self._add_late(self._run.step + 1)
        status = self._folder.read_status() or {}
        self._run.finish(exit_code=int(status.get("state") == "failed"))
        self._remove_older()

    def _show(self, step: int, name: str, image: np.ndarray | str, text: str) -> None:
        if step >= self._run.step:
            self._run.log({name: self._image(image, caption=text)}, step=step)

    def _add_late(self, row: int) -> None:
        if self._late and row > self._late_row:
            self._run.log(self._late.popleft(), step=row)
            self._late_row = row

    def _replay(self, run: TrackedRun) -> None:
        """Sends what the server lacks of the history."""
        first = self._run.step
        lines = [*run.history, *(run.evaluations if first == 0 else ())]
        calls = [(int(line["step"]), partial(self._line, line)) for line in lines]
        calls += [(one.step, partial(self._earlier, one)) for one in run.images]
        for step, call in sorted(calls, key=itemgetter(0)):
            if step >= first:
                call()

    def _line(self, line: Mapping[str, Any]) -> None:
        values = {name: value for name, value in line.items() if name not in RESERVED}
        if "time" in line:
            values["_timestamp"] = datetime.fromisoformat(line["time"]).timestamp()
        self.write(int(line["step"]), int(line["samples"]), values)

    def _earlier(self, one: EarlierImage) -> None:
        if one.path.is_file():
            self._show(one.step, one.name, str(one.path), one.text)

    def _remove_older(self) -> None:
        while self._older:
            shutil.rmtree(self._older.pop(), ignore_errors=True)


def _identity(folder: Path) -> str:
    """The id of the run at Weights & Biases, which its folder keeps."""
    path = folder / IDENTITY
    if not path.exists():
        write_json_atomically(path, {"id": secrets.token_hex(4)})
    try:
        return str(documents.read_object(path)["id"])
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{path} is damaged ({error}): it holds the id of this run at Weights & Biases. Write "
            '{"id": "THE-ID"} into it, or delete it to begin a new run there',
            code="damaged",
        ) from error


def start(settings: Settings, run: TrackedRun) -> Wandb:
    """Begins the run there, or goes on with it."""
    return Wandb(settings, run)
