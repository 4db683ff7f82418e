"""Follows a run: measures its checkpoints as they come, in a process of its own that training never waits for.

A checkpoint has its name once it is whole, and every byte is verified as it is read. Several processes may follow one
run: each result is the work of one, which holds a lock that ends with it; results are files, so that a restart takes up
where it was.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Literal

from daguerre import threads
from daguerre.checkpoint.atomic import make_folder
from daguerre.checkpoint.manifest import CheckpointError
from daguerre.checkpoint.run_dir import RunFolder, lock_holder
from daguerre.checkpoint.store import Store
from daguerre.errors import Held, UserError
from daguerre.evaluation import results
from daguerre.evaluation.evaluate import ModelEvaluation
from daguerre.generation import generate, load
from daguerre.generation.load import Model
from daguerre.remote import local_copy
from daguerre.report import page

Policy = Literal["newest", "all"]
_WAITING = "waiting"
"""Folder of checkpoints that are held for follow=all, as the trainer keeps the newest alone."""


@dataclass(frozen=True)
class Followed:
    """The checkpoints of a run that are there to measure."""

    run: RunFolder
    waiting: Path | None
    """Folder of held ones; None takes those of the run alone."""

    def names(self) -> list[str]:
        """Oldest first."""
        own = Store(self.run.checkpoints).names()
        held = Store(self.waiting).names() if self.waiting else []
        return sorted({*own, *held}, key=lambda name: int(name.rpartition("-")[2]))

    def path(self, name: str) -> Path:
        held = self.waiting / name if self.waiting else None
        return held if held is not None and held.is_dir() else self.run.checkpoints / name

    def hold(self) -> None:
        """Links the files of new checkpoints, so that they stay when the trainer removes its own."""
        assert self.waiting is not None
        make_folder(self.waiting)
        for name in Store(self.run.checkpoints).names():
            if not (self.waiting / name).exists() and not (self.waiting / f"{name}.measured").exists():
                temporary = self.waiting / f".{name}.{os.getpid()}"
                with suppress(OSError):  # the trainer has removed it in the middle, or another process holds it
                    _link(self.run.checkpoints / name, temporary)
                    os.rename(temporary, self.waiting / name)
                shutil.rmtree(temporary, ignore_errors=True)

    def release(self, name: str) -> None:
        """Lets go of a checkpoint that was measured."""
        if self.waiting is not None:
            (self.waiting / f"{name}.measured").touch()
            shutil.rmtree(self.waiting / name, ignore_errors=True)


def wait_for_run(name: str, patience_seconds: float, every_seconds: float, stop: Callable[[], bool]) -> None:
    """Waits until a run folder is there, as both may be started at once. UserError where none comes."""
    deadline, said = time.monotonic() + patience_seconds, False
    while "://" not in name and not (Path(name).expanduser() / "config.yaml").is_file():
        if not said:
            print(f"waiting for {name}: no run has begun there yet", flush=True)
            said = True
        if time.monotonic() > deadline:
            raise UserError(f"{name}: no run has begun there within {patience_seconds:g} s", code="missing")
        _pause(every_seconds, stop)


def follow(
    jobs: Sequence[ModelEvaluation], followed: Followed, policy: Policy, every_seconds: float, patience_seconds: float
) -> None:
    """Measures checkpoints until the run is finished and none is left. generate.Stopped for a signal."""
    run, stop, active = followed.run, jobs[0].stop, time.monotonic()
    done: set[str] = set()
    print(f"following {local_copy.display_name(run.path)}: {policy} checkpoint{'s' * (policy == 'all')}", flush=True)
    while True:
        over = _is_over(run)
        if policy == "newest":
            _refresh(run)
        left = [name for name in followed.names() if name not in done]
        chosen = _measured(jobs, followed, left if policy == "all" else left[::-1][:1], done)
        if chosen or lock_holder(run.path) is not None:
            active = time.monotonic()
        if not chosen and (over or time.monotonic() - active > patience_seconds):
            print("the run is over, and its checkpoints are measured", flush=True)
            return
        if not chosen:
            _pause(every_seconds, stop)


def _measured(jobs: Sequence[ModelEvaluation], followed: Followed, names: Sequence[str], done: set[str]) -> str | None:
    """Measures the first checkpoint that nobody else works at; returns its name."""
    for name in names:
        try:
            checkpoint = load.read(Store(followed.path(name).parent), followed.path(name))
            for job in jobs:
                _measure(replace(job, checkpoint=checkpoint), len(jobs) > 1)
        except Held:
            continue
        except (CheckpointError, FileNotFoundError) as error:
            print(f"{name} is not measured: {error}", flush=True)
        done.add(name)
        followed.release(name)
        return name
    return None


def _measure(job: ModelEvaluation, one_of_several: bool) -> None:
    assert job.checkpoint is not None
    if results.has(job.folder.path, job.settings):
        return
    found = job.run()
    step = job.loading.provenance["step"]
    for name, result in (found or {}).items():
        numbers = ", ".join(f"{row.name} {100 * row.value:.1f} %" if row.share else f"{row.name} {row.value:.6g}"
                            for row in result.rows)  # fmt: skip
        guidance = f", guidance {job.config.sampling.guidance_scale:g}" if one_of_several else ""
        warning = f" (warning: {result.warning})" if result.warning else ""
        print(f"step {step:,}{guidance}, {name}: {numbers}{warning}", flush=True)
    refresh_page(job)


def refresh_page(job: ModelEvaluation) -> None:
    """Rewrites the report of the run, if nobody trains it: a trainer writes it itself at each save."""
    run = job.model.run
    if run is not None and lock_holder(run.path) is None and local_copy.origin(run.path) is None:
        page.write(run.path)


def _is_over(run: RunFolder) -> bool:
    status = run.read_status() or {}
    return status.get("state") in ("finished", "failed") and lock_holder(run.path) is None


def _refresh(run: RunFolder) -> None:
    """Brings the copy of a run of an object store up to date."""
    if (origin := local_copy.origin(run.path)) is not None:
        local_copy.located(origin.url)
        local_copy.fetch(run.path)


@contextmanager
def holding(model: Model, root: Path, policy: Policy, every_seconds: float) -> Iterator[Followed]:
    """The checkpoints of a run, whose results are in `root`; with `all`, a thread holds each one that comes, from now
    on: training may remove it while networks are loaded. UserError for what is no run."""
    run = model.run
    if run is None:
        raise UserError(f"--follow is for runs, and {model.name} is a {model.kind}", code="conflict")
    if policy == "newest":
        yield Followed(run, None)
        return
    if local_copy.origin(run.path) is not None:
        raise UserError(
            "follow=all holds checkpoints by links to their files, and this run is in an object store: follow the "
            "newest, or raise checkpoint.keep and evaluate by resume_from_checkpoint=NAME afterwards",
            code="unsupported",
            setting="follow",
        )
    followed = Followed(run, root / _WAITING)
    followed.hold()

    def watch(over: Event) -> None:
        while not over.wait(min(1.0, every_seconds)):
            followed.hold()

    with threads.background("follow", watch):
        yield followed


def _link(source: Path, target: Path) -> None:
    """Hard links of all files; copies where the file system has no links."""
    shutil.rmtree(target, ignore_errors=True)

    def linked(file: str, to: str) -> str:
        try:
            os.link(file, to)
        except OSError:
            shutil.copyfile(file, to)
        return to

    shutil.copytree(source, target, copy_function=linked)


def _pause(seconds: float, stop: Callable[[], bool]) -> None:
    """Waits; generate.Stopped if a signal comes."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if stop():
            raise generate.Stopped
        time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))
