"""Runs that somebody looks at: their curves and the parts of their page, made again when files have changed."""

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from daguerre import user_cache
from daguerre.checkpoint.atomic import make_folder
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.errors import UserError
from daguerre.report.html import Html
from daguerre.report.run import Run, read_run
from daguerre.serve import summaries
from daguerre.serve.catalog import Catalog
from daguerre.tracking.followed import Followed

_MOST_RUNS = 12
"""Runs whose curves stay in memory: 3 MB each."""
_KEPT_BYTES = 4 << 20
"""Of a metrics file, beyond which its curves are kept in the user's cache."""
_LEAST_SECONDS = 1.0
_SHARE = 0.04
"""Of the time that looking at a run may take."""

Parts = dict[str, Html | None]


@dataclass
class Watched:
    """One run."""

    id: str
    folder: Path
    followed: Followed
    run: Run | None = None
    """As it was read last; None before."""
    parts: Parts = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    """Equal marks mean equal parts."""
    problem: str = ""
    """Why its metrics cannot be read."""
    far_problem: Callable[[], str] = str
    """Says why its files cannot be had from a store."""
    complete: bool = False
    """True if the metrics were read as far as they went."""
    looking: asyncio.Task[None] | None = None
    """The last look, which may go on."""
    _stamp: object = None
    _next: float = 0.0

    @property
    def version(self) -> str:
        """Changes when whole curves must be fetched, and not only their end."""
        return f"{os.getpid()}.{self.followed.generation}.{self.followed.place.inode}"

    @property
    def share_read(self) -> float:
        """Of the metrics file."""
        return self.followed.place.offset / self.followed.size_bytes if self.followed.size_bytes else 1.0

    async def look(self, make: Callable[["Watched", Run], Parts]) -> None:
        """Reads what is new, no more often than is worth it; one look at a time. UserError for a run that cannot be
        read."""
        if (began := time.monotonic()) < self._next:
            return
        await self._read_metrics()
        stamp = await run_in_threadpool(self._look_at_files)
        if stamp != self._stamp:
            self.run = await run_in_threadpool(self._read_run)
            self.parts = await run_in_threadpool(make, self, self.run)
            self.marks = {name: sha256((part or "").encode()).hexdigest()[:12] for name, part in self.parts.items()}
            self._stamp = stamp
        took = time.monotonic() - began
        self._next = began + took + max(_LEAST_SECONDS, took / _SHARE)

    async def _read_metrics(self) -> None:
        """In steps, between which others get their answers."""
        before = self.followed.place.offset
        reading = self.followed.read()
        try:
            while await run_in_threadpool(next, reading, self) is not self:
                self.complete = self.share_read >= 1.0
            self.problem, self.complete = "", True
        except (OSError, UserError) as error:
            self.problem, self.complete = str(error), True
        if self.followed.place.offset - before > _KEPT_BYTES:
            await run_in_threadpool(_keep, self.followed)

    def _look_at_files(self) -> object:
        paths = RunFolder(self.folder)
        others = (
            paths.data,
            paths.evaluation,
            paths.evaluations,
            paths.environment,
            paths.checkpoints,
            paths.log,
            paths.answers,
        )
        times = [path.stat().st_mtime_ns if path.exists() else 0 for path in (*others, paths.adapter, paths.pipeline)]
        times += [path.stat().st_mtime_ns for path in sorted(paths.evaluations.glob("*/"))]
        return summaries.stamp(self.folder), times, self.followed.place.offset, self.problem, self.far_problem()

    def _read_run(self) -> Run:
        run = read_run(self.folder, self.followed.curves)
        run.problems.extend(filter(None, (self.problem, self.far_problem())))
        return run


class Watching:
    """The runs that were looked at last."""

    def __init__(self, catalog: Catalog, make: Callable[[Watched, Run], Parts]) -> None:
        self.catalog, self.make = catalog, make
        self._runs: OrderedDict[str, Watched] = OrderedDict()

    async def look(self, id: str, patience: float = 0.0) -> Watched:
        """A run as it is now, or, after some seconds of patience, as far as it is read. UserError for no run, and for
        one that must not be shown."""
        folder = await run_in_threadpool(self.catalog.at, id)
        if folder is None:
            raise UserError("there is no such run: it may have been moved", code="missing")
        run = self._watched(id, folder)
        task = run.looking
        if task is None or task.done():
            task = run.looking = asyncio.create_task(run.look(self.make))
        await asyncio.wait([task], timeout=None if run.complete else patience)
        if task.done():
            task.result()  # its error
        return run

    def _watched(self, id: str, folder: Path) -> Watched:
        if id not in self._runs:
            followed = Followed(RunFolder(folder).metrics)
            followed.take_up(_kept(followed))
            self._runs[id] = Watched(id, folder, followed, far_problem=partial(self.catalog.problem, folder))
        self._runs.move_to_end(id)
        while len(self._runs) > _MOST_RUNS:
            self._runs.popitem(last=False)
        return self._runs[id]


def _kept(followed: Followed) -> Path:
    name = sha256(os.fsencode(followed.path.resolve())).hexdigest()[:24]
    return user_cache.folder() / "curves" / f"{name}.npz"


def _keep(followed: Followed) -> None:
    path = _kept(followed)
    try:
        make_folder(path.parent)
        followed.dump(path)
    except OSError:
        return  # a full disk costs time at the next start, and nothing else
