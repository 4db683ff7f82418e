"""Does what is asked of a run between two updates (checkpoint/actions.py), and waits while it is paused.

Nothing here changes what is learnt: weights are equal to the bit with and without actions.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from signal import SIGINT, Signals
from types import TracebackType
from typing import Any, Self

from daguerre.checkpoint.actions import ENDS, PAUSED, RELEASED, STOPPED, Action, Asked, Inbox
from daguerre.checkpoint.manifest import CheckpointError
from daguerre.checkpoint.run_dir import now
from daguerre.checkpoint.signals import StopSignals
from daguerre.config import checks
from daguerre.config.config import Config
from daguerre.distributed.process_group import Processes
from daguerre.errors import UserError
from daguerre.formatting import counted
from daguerre.generation import generate
from daguerre.memory import advice
from daguerre.models import encoders
from daguerre.ranks import RanksGone
from daguerre.run import results, samples
from daguerre.run.setup import Run
from daguerre.training.oom import OutOfMemory
from daguerre.training.state import evaluating

_PAUSE_SECONDS = 0.2
"""Between two looks of a run that is paused."""
_MOST_IMAGES, _MOST_STEPS, _MOST_PX = 100, 1000, 8192
"""Of images that are asked for: training waits for them."""
_OUTCOMES = {"stop": STOPPED, "release": RELEASED}

Done = tuple[Run, str, str]
"""The run from here on, what was done in words, and a folder with what was made."""


@dataclass
class Control:
    """`with Control(...) as control:` around the loop, on all ranks; rank 0 reads and answers."""

    inbox: Inbox | None
    """None on other ranks."""
    stop: StopSignals
    processes: Processes
    paused_since: str = field(default="", init=False)
    """Empty unless it is paused."""
    _new: list[Asked] = field(default_factory=list, init=False)
    _asked: int = field(default=0, init=False)
    _saving: list[tuple[Asked, str]] = field(default_factory=list, init=False)
    _ending: list[Asked] = field(default_factory=list, init=False)
    _reason: str = field(default="", init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        left = [*self._new, *self._ending, *(asked for asked, _ in self._saving)]
        for asked in left:
            self._answer(asked, False, "the run ended before this was done")
        if self.inbox is not None:
            self.inbox.refuse_all("the run has ended")

    def signalled(self) -> Signals | None:
        """The signal that asked any rank to stop, SIGINT where an action does: the same on all ranks, which ask once.
        Actions that came meanwhile wait for `obey`."""
        if self.inbox is not None:
            self._new += self.inbox.take()
        ends = SIGINT if any(asked.action.kind in ENDS for asked in self._new) else None
        signal, self._asked = self.processes.agreement.between_updates(self.stop.signal or ends, len(self._new))
        return signal

    def obey(self, run: Run, signal: Signals | None) -> tuple[Run, Signals | None]:
        """Does what was asked, shows what became of a save that has ended, and returns at the end of a pause: the run
        as it goes on, and the signal to stop, if there is one by now; the state is saved then."""
        run = self._do_all(run)
        if not self.paused_since or signal is not None:
            return run, signal
        with results.busy(run, PAUSED):
            run.status("running", reason=PAUSED, since=self.paused_since)
            while self.paused_since and signal is None:
                time.sleep(_PAUSE_SECONDS)
                signal = self.signalled()
                run = self._do_all(run)
        if signal is not None:
            results.save_if_missing(run)
        return run, signal

    def outcome(self, signal: Signals) -> str:
        """The end by this signal, in words."""
        return self._reason or f"stopped by {signal.name}"

    def ended(self, run: Run) -> None:
        """Answers what waited for the last save."""
        self._answer_saves(run)
        for asked in self._ending:
            self._answer(asked, True, f"saved after {_updates(run)}", run.state.step)
        self._ending = []

    def _do_all(self, run: Run) -> Run:
        acted, asked_of_all = bool(self._asked), list[Asked]()
        if acted:
            shared = [(asked.ident, asked.action.model_dump()) for asked in self._new]
            shared = self.processes.agreement.share(shared)
            asked_of_all, self._new = [Asked(ident, Action(**action)) for ident, action in shared], []
        for asked in asked_of_all:
            run = self._do(run, asked)
        if run.saver.finished():
            run.saved(run.saver.settle())
        self._answer_saves(run)
        if acted and self.paused_since:
            run.status("running", reason=PAUSED, since=self.paused_since)  # what was done may have written another
        return run

    def _do(self, run: Run, asked: Asked) -> Run:
        kind = asked.action.kind
        if kind in ENDS:
            self._ending.append(asked)
            self._reason = _OUTCOMES[kind]
            return run
        if kind == "save":
            results.save_if_missing(run)
            self._saving.append((asked, results.checkpoint_name(run)))
            return run
        act: Mapping[str, Callable[[Run, Asked], Done]] = {
            "sample": sample,
            "evaluate": self._evaluate,
            "change": change,
            "pause": self._pause,
            "continue": self._continue,
        }
        try:
            run, reason, files = act[kind](run, asked)
        except (UserError, OSError) as error:
            if isinstance(error, (RanksGone, CheckpointError)) or (
                isinstance(error, OutOfMemory) and run.processes.world.size > 1  # the others wait for this one
            ):
                raise
            self._answer(asked, False, str(error), run.state.step)
        else:
            self._answer(asked, True, reason, run.state.step, files)
        return run

    def _answer_saves(self, run: Run) -> None:
        """Answers those whose checkpoint was written by now, or was not."""
        if self.inbox is None or not self._saving or run.saver.in_flight:
            return
        there = run.saver.store.names()
        for asked, name in self._saving:
            written = name in there
            text = f"saved as {name}" if written else f"{name} could not be written: the log of the run says why"
            self._answer(asked, written, text, run.state.step, f"checkpoints/{name}" if written else "")
        self._saving = []

    def _answer(self, asked: Asked, done: bool, reason: str, step: int | None = None, files: str = "") -> None:
        if self.inbox is not None:
            self.inbox.answer(asked, done, reason, step, files)

    def _pause(self, run: Run, asked: Asked) -> Done:
        if self.paused_since:
            raise UserError("the run is paused already")
        self.paused_since = now()
        return run, f"paused after {_updates(run)}; the model stays in memory", ""

    def _continue(self, run: Run, asked: Asked) -> Done:
        if not self.paused_since:
            raise UserError("the run is not paused")
        self.paused_since = ""
        run.status("running")
        return run, f"goes on after {_updates(run)}", ""

    def _evaluate(self, run: Run, asked: Asked) -> Done:
        validates = run.every.validation is not None
        if not validates and results.measured(run) is None:
            raise UserError(
                "there is nothing to evaluate in this run: no sample is held out for validation (validation.every), "
                "and its source has no metric. `daguerre evaluate` measures its checkpoints",
                code="empty",
            )
        if validates:
            results.validate(run)
        try:
            results.measure(run, results.Stopping(run))
        except generate.Stopped:
            raise UserError("a signal stopped it before it was done", code="failed") from None
        return run, f"evaluated after {_updates(run)}", ""


def sample(run: Run, asked: Asked) -> Done:
    """Images with the prompts and settings of an action, which count for it alone."""
    values = dict(asked.action.values)
    strength = _strength(run, values.pop("strength", None))
    if values.get("prompts"):
        values.setdefault("num_images", len(values["prompts"]))
    config = with_sampling(run, values)
    sampling = config.sampling
    if not sampling.num_images:
        raise UserError("num_images is 0: ask for one image or more", code="empty", setting="num_images")
    if not run.parts.family.generates:
        raise UserError("this model generates no images by itself", code="unsupported")
    folder = run.folder.samples / samples.ASKED / asked.ident
    if results.generates(run):
        with (
            results.busy(run, "generating images", lambda _: advice.of_generating(sampling)),
            evaluating(run.state),
            encoders.present(run.parts.family),
            run.parts.attached.at(strength),
        ):
            each = results.sample_requests(replace(run, config=config))
            provenance = {"step": run.state.step, "strength": strength}
            samples.write(run.parts, config, each, folder if run.processes.leads else None, provenance)
    files = folder.relative_to(run.folder.path).as_posix()
    return run, f"{counted(sampling.num_images, 'image')} after {_updates(run)}: {files}", files


def change(run: Run, asked: Asked) -> Done:
    """The run with other settings of sampling, which its recipe has from now on."""
    config = with_sampling(run, asked.action.values)
    if config == run.config:
        raise UserError("the settings of sampling are these already", code="unused")
    run = replace(run, config=config)
    run.record_recipe()
    return run, f"{', '.join(asked.action.values)} changed after {_updates(run)}", ""


def with_sampling(run: Run, values: Mapping[str, Any]) -> Config:
    """The run's config with other settings of sampling. UserError for those with which it cannot generate."""
    if "prompts_file" in values:  # it is asked by whoever writes into the folder: no path of this machine is opened
        raise UserError("prompts_file: give the prompts themselves (prompts)", code="unsupported")
    own, sampling = run.config.sampling, run.config.sampling.changed(values)
    most_images, most_steps = max(own.num_images, _MOST_IMAGES), max(own.num_inference_steps, _MOST_STEPS)
    # Before anything is listed: numbers of a forged file may be beyond all memory.
    if sampling.num_images > most_images or sampling.num_inference_steps > most_steps:
        raise UserError(
            f"{counted(sampling.num_images, 'image')} in {counted(sampling.num_inference_steps, 'step')}: training "
            f"waits for them, so {most_images} images in {most_steps:,} steps are the most"
        )
    if max(sampling.height or 0, sampling.width or 0) > _MOST_PX:
        raise UserError(f"an image of {sampling.height} x {sampling.width} px: {_MOST_PX:,} px a side are the most")
    config = run.config.model_copy(update={"sampling": sampling})
    if problems := checks.problems(dict(config)):
        raise UserError("; ".join(f"{problem.path} {problem.text}" for problem in problems))
    samples.check(config, run.parts)
    return config


def _strength(run: Run, given: Any) -> float:
    """The strength of what adapters add. UserError where nothing has one."""
    if given is None:
        return 1.0
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 2:
        raise UserError(f"strength is {given!r}: give a number from 0 (the base) to 2")
    if not run.parts.attached.strengths:
        raise UserError(
            "strength: nothing that this run trains is added to a base at a strength", code="unused", setting="strength"
        )
    return float(given)


def _updates(run: Run) -> str:
    return counted(run.state.step, "update")
