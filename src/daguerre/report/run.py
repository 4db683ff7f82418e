"""Reads a run folder for its page. Nothing is written, and no tensor is opened.

Every file may be missing: a run has just begun, or it never evaluates. A file that cannot be read becomes a problem
that the page shows.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from daguerre import documents
from daguerre.checkpoint.actions import PAUSED, RELEASED
from daguerre.checkpoint.run_dir import Holder, RunFolder, RunFolderError, lock_holder
from daguerre.errors import UserError
from daguerre.regular import check_regular
from daguerre.tracking.curves import Curves
from daguerre.tracking.followed import read_curves

SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""That of libyaml reads a recipe nine times as fast."""
MOST_BYTES = 32 << 20
"""Of a file that is read as a whole."""
LIVE = ("running", "paused")
"""States of a run that a process holds."""
_BY_REASON = {("running", PAUSED): "paused", ("saved", RELEASED): "released"}


@dataclass(frozen=True)
class Sample:
    """A sample image of the run."""

    step: int
    path: Path
    prompt: str
    seed: int | None
    how: dict[str, Any]
    """Everything that samples.json says of it."""
    controls: Mapping[str, Path] = field(default_factory=dict)
    """Its control images, by name."""


@dataclass(frozen=True)
class Run:
    """A run folder, read."""

    folder: Path
    state: str
    """running, paused, saved, released, finished, failed; interrupted: it says running, but nobody holds the folder;
    unknown."""
    status: dict[str, Any]
    config: dict[str, Any]
    config_text: str
    environment: dict[str, Any]
    curves: Curves
    """What the metrics say."""
    data: dict[str, Any]
    evaluation: dict[str, Any]
    evaluations: list[dict[str, Any]]
    """Results of `daguerre evaluate`, oldest step first."""
    ledger: dict[str, Any]
    """The newest loss ledger; {} without one."""
    compared: dict[str, Any]
    """The newest comparison of an adapter with its base; {} without one."""
    samples: list[Sample]
    """Oldest step first."""
    strengths: list[Sample]
    """Images of one step with adapters at several strengths, which `how` has; the weakest first."""
    problems: list[str]
    """Files that could not be read, and why."""

    @property
    def name(self) -> str:
        return str(self.config.get("run_name") or self.folder.name)

    def setting(self, path: str) -> Any:
        """A setting by its dotted path, or None."""
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value


def read_run(folder: Path, curves: Curves | None = None) -> Run:
    """Reads a run folder; its metrics too, unless `curves` has them. Raises UserError if it holds neither config.yaml
    nor metrics."""
    paths = RunFolder(folder)
    if not paths.config.exists() and not paths.metrics.exists():
        raise UserError(
            f"{str(folder)!r} is not a run folder: it has no config.yaml and no metrics/metrics.jsonl. Give the "
            "folder of a run, such as runs/quickstart",
            code="missing",
        )
    problems: list[str] = []
    status = _document(paths.status, problems)
    config_text = _try(paths.config, lambda path: path.read_text(encoding="utf-8"), problems) or ""
    config = _try(paths.config, lambda path: yaml.load(path.read_text(encoding="utf-8"), SAFE_LOADER), problems)
    return Run(
        folder=folder,
        state=run_state(folder, status),
        status=status,
        config=config if isinstance(config, dict) else {},
        config_text=config_text,
        environment=_document(paths.environment, problems),
        curves=curves or _try(paths.metrics, read_curves, problems) or Curves(),
        data=_document(paths.data, problems),
        evaluation=_document(paths.evaluation, problems),
        evaluations=evaluations(paths.evaluations, problems),
        ledger=ledger(paths.evaluations, problems),
        compared=compared(paths.evaluations, problems),
        samples=samples(paths.samples, problems),
        strengths=strengths(paths.samples, problems),
        problems=list(dict.fromkeys(problems)),
    )


def holder(folder: Path) -> Holder | None:
    """The process that works in a run folder; None also where no lock can be read."""
    try:
        return lock_holder(folder)
    except (OSError, RunFolderError):
        return None


def run_state(folder: Path, status: Mapping[str, Any]) -> str:
    """The state of a run, by its lock: a status that says `running` is of a killed run if nobody holds the folder, and
    one of a process before the one that holds it now says nothing any more. `paused` and `released` are reasons."""
    state, now = str(status.get("state", "unknown")), holder(folder)
    known = _BY_REASON.get((state, str(status.get("reason"))), state)
    if now is None:
        return "interrupted" if state == "running" else known
    own = (status.get("pid"), status.get("host")) == (now.pid, now.host) and str(status.get("updated")) >= now.since
    return known if own else "running"


def waits_since(status: Mapping[str, Any]) -> str:
    """From when on a paused or released run waits for a person, as text; empty where its status does not say it."""
    return str(status.get("since") or status.get("updated") or "")


def evaluations(folder: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The results of `daguerre evaluate`, oldest step first; adds those that cannot be read to `problems`."""
    found = [_document(path, problems) for path in sorted(folder.glob("*/result.json"))]
    return sorted(filter(None, found), key=_evaluated_step)


def ledger(folder: Path, problems: list[str]) -> dict[str, Any]:
    """The newest loss ledger of `daguerre evaluate`, {} without one; adds those that cannot be read to `problems`."""
    found = [_document(path, problems) for path in sorted(folder.glob("ledger-*/ledger.json"))]
    for one in found:
        listed = one.get("pictures")
        one["pictures"] = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    whole = [one for one in found if isinstance(one.get("step"), int) and one["pictures"]]
    return max(whole, key=lambda one: int(one["step"]), default={})


def compared(folder: Path, problems: list[str]) -> dict[str, Any]:
    """The newest comparison of an adapter with its base, {} without one; adds those that cannot be read to
    `problems`."""
    found = [_document(path, problems) for path in sorted(folder.glob("compare-*/compare.json"))]
    return max(filter(None, found), key=lambda one: str(one.get("time")), default={})


def _evaluated_step(document: dict[str, Any]) -> tuple[int, float]:
    protocol = document.get("protocol")
    step, scale = (protocol.get(name) if isinstance(protocol, dict) else None for name in ("step", "guidance_scale"))
    return (step if isinstance(step, int) else 0), (float(scale) if isinstance(scale, int | float) else 0.0)


def samples(folder: Path, problems: list[str], only: str = "step-*") -> list[Sample]:
    """The sample images of a run, oldest first, or those of `only` a save; adds listings that cannot be read to
    `problems`."""
    found = []
    for listing in sorted(folder.glob(f"{only}/samples.json")):
        digits = listing.parent.name.removeprefix("step-")
        if digits.isdecimal():
            found += _listed(listing, int(digits), problems)
    return sorted(found, key=lambda sample: sample.step)


def strengths(folder: Path, problems: list[str]) -> list[Sample]:
    """Images with adapters at several strengths, by strength; adds listings that cannot be read to `problems`."""
    found = [each for path in sorted(folder.glob("strengths/*/samples.json")) for each in _listed(path, 0, problems)]
    return sorted((each for each in found if _strength(each) is not None), key=lambda each: _strength(each) or 0.0)


def asked(folder: Path, problems: list[str]) -> list[Sample]:
    """Images that were asked for while the run trained, oldest first; adds listings that cannot be read to
    `problems`."""
    found = []
    for listing in sorted(folder.glob("asked/*/samples.json")):
        for one in _listed(listing, 0, problems):
            step = one.how.get("step")
            found.append(replace(one, step=step if isinstance(step, int) else 0))
    return found


def _strength(sample: Sample) -> float | None:
    value = sample.how.get("strength")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _listed(listing: Path, step: int, problems: list[str]) -> list[Sample]:
    entries, found = _try(listing, lambda path: documents.parse(path.read_bytes()), problems), []
    for entry in entries if isinstance(entries, list) else []:
        own = entry if isinstance(entry, dict) else {}
        beside = own.get("control_files")
        files = {"": own.get("file"), **(beside if isinstance(beside, dict) else {})}
        # Plain names: the page never shows an image from outside the run folder.
        if all(isinstance(name, str) and name and Path(name).name == name for name in files.values()):
            image, *controls = ((name, listing.parent / str(file)) for name, file in files.items())
            how = {name: value for name, value in own.items() if name != "control_files"}
            seed = own.get("seed") if isinstance(own.get("seed"), int) else None  # rows are found by it
            found.append(Sample(step, image[1], str(own.get("prompt", "")), seed, how, dict(controls)))
        else:
            place = "/".join(listing.parts[listing.parts.index("samples") :])
            problems.append(f"{place}: an entry names no image of its folder")
    return found


def _document(path: Path, problems: list[str]) -> dict[str, Any]:
    document = _try(path, lambda p: documents.parse(p.read_bytes()), problems)
    if document is not None and not isinstance(document, dict):
        problems.append(f"{path.name}: holds no JSON object")
    return document if isinstance(document, dict) else {}


def _try(path: Path, read: Callable[[Path], Any], problems: list[str]) -> Any:
    """Result of `read` on a file; None if it is missing, or unreadable, which is noted."""
    if not path.exists():
        return None
    try:
        if path.suffix != ".jsonl" and (size := path.stat().st_size) > MOST_BYTES:
            problems.append(f"{path.name} has {size:,} bytes, more than such a file ever has: it is left out")
            return None
        check_regular(path)
        return read(path)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        problems.append(f"{path.name}: cannot be read: {error}")
        return None
