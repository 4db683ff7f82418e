"""The sinks of a run's numbers: its metrics file and the recipe's trackers, each of these in a thread of its own."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

from daguerre import documents, plugins
from daguerre.checkpoint.atomic import locked, to_json, write_json_atomically
from daguerre.checkpoint.run_dir import RunFolder, lock_holder
from daguerre.config.config import Config
from daguerre.credentials import scrub
from daguerre.errors import UserError
from daguerre.formatting import first_line
from daguerre.report import run as reported
from daguerre.report.evaluations import protocol_name
from daguerre.tracking.background import Background
from daguerre.tracking.settings import LoggingSettings, TrackerSettings
from daguerre.tracking.sinks import MetricsFile, Sink, read_metrics
from daguerre.tracking.tracker import EarlierImage, TrackedRun

_SENT = "sent-{}.json"
"""File next to the results of `daguerre evaluate`: those that a tracker has taken, with the time of each."""


def check(settings: LoggingSettings) -> None:
    """UserError for what a tracker needs and lacks: before training."""
    for name, own in settings.trackers.items():
        if own.active:
            plugins.find("trackers", name).check(own)


def sinks(
    config: Config, folder: RunFolder, step: int | None, say: Callable[[str], None], stack: ExitStack
) -> list[Sink]:
    """Sinks of the numbers after `step` (None: of a fresh run). The stack closes them."""

    def close(sink: Sink) -> None:
        with suppress(OSError):  # a full disk must not hide why the run ends
            sink.close()

    # The file first, and waited for: it is the truth, from which a tracker that was away gets what it lacks.
    found: list[Sink] = [MetricsFile(folder.metrics), *_started(config, folder, step, say)]
    for sink in found:
        stack.callback(close, sink)
    return found


def _started(config: Config, folder: RunFolder, step: int | None, say: Callable[[str], None]) -> list[Background]:
    """The recipe's trackers."""
    active = {name: own for name, own in config.logging.trackers.items() if own.active}
    if not active:
        return []
    run = _tracked(config, folder, step, say)
    # A thread each: no update waits for a network, and one tracker that hangs holds up none of the others.
    return [Background(name, partial(_start, own, run, folder), say) for name, own in active.items()]


def _start(settings: TrackerSettings, run: TrackedRun, folder: RunFolder) -> Sink:
    taken = [{"step": _step(one), "samples": 0, **_values(one)} for one in _evaluations(folder, settings.name)[0]]
    sink: Sink = plugins.find("trackers", settings.name).start(settings, replace(run, evaluations=taken))
    return sink


def image_name(number: int) -> str:
    """The name of a sample image in trackers, by its number among those of a save."""
    return f"samples/{number:03d}"


def image_text(prompt: str, seed: Any) -> str:
    """The text of a sample image in trackers."""
    return f"{prompt}\nseed {seed}"


def send_evaluations(sinks: Iterable[Sink], folder: RunFolder, samples: int) -> None:
    """Gives each tracker among the sinks the results of `daguerre evaluate` that it has not taken yet, each at the step
    whose weights it measures; the metrics file keeps none of them. A tracker that fails gets them at another start."""
    for sink in sinks:
        if isinstance(sink, Background):
            sink.call(partial(_send, folder, sink.name, samples))


def _send(folder: RunFolder, name: str, samples: int, sink: Sink) -> None:
    taken, new = _evaluations(folder, name)
    for one in new:
        sink.write(_step(one), samples, _values(one))
    if new:
        # With the time: a result that was measured again is another one.
        times = {_identity(one): one.get("time") for one in (*taken, *new)}
        write_json_atomically(folder.evaluations / _SENT.format(name), times)


def send_late(config: Config, folder: RunFolder, say: Callable[[str], None]) -> None:
    """Gives trackers the results that came after training, if nobody trains now: a trainer sends them with its next
    save. A message says what they lack."""
    active = [name for name, own in config.logging.trackers.items() if own.active]

    def are_missing() -> bool:
        return any(_evaluations(folder, name)[1] for name in active)

    # Asked before the lock, too: mostly there is nothing to send.
    if lock_holder(folder.path) is not None or not are_missing():
        return
    last = (read_metrics(folder.metrics) or [{"step": 0, "samples": 0}])[-1]
    try:
        check(config.logging)
        with ExitStack() as stack:
            stack.enter_context(locked(folder.evaluations))
            if not are_missing():  # another process was first
                return
            started = _started(config, folder, last["step"], say)
            for tracker in started:
                stack.callback(tracker.close)
            send_evaluations(started, folder, last["samples"])
    except (UserError, OSError) as error:
        say(f"trackers did not get the new results, the report has them: {first_line(error)}")


def _evaluations(folder: RunFolder, tracker: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The results that a tracker has taken, and those that it has not, oldest step first."""
    file = folder.evaluations / _SENT.format(tracker)
    try:
        times = documents.read_object(file)
    except (FileNotFoundError, ValueError):  # a damaged list: the tracker gets everything again, under the same names
        times = {}
    taken: list[dict[str, Any]] = []
    new: list[dict[str, Any]] = []
    for one in reported.evaluations(folder.evaluations, []):
        (taken if times.get(_identity(one)) == one.get("time") else new).append(one)
    return taken, new


def _step(result: Mapping[str, Any]) -> int:
    return int(result["protocol"].get("step", 0))


def _values(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a result, under names that no other protocol has."""
    protocol, tables = protocol_name(result["protocol"]), result["tables"].items()
    return {
        f"evaluation/{table}/{row['name']}/{protocol}": row["value"] for table, body in tables for row in body["rows"]
    }


def _identity(result: Mapping[str, Any]) -> str:
    """Tells protocols and checkpoints apart."""
    return sha256(to_json(result["protocol"])).hexdigest()[:16]


def _tracked(config: Config, folder: RunFolder, step: int | None, say: Callable[[str], None]) -> TrackedRun:
    """The run, with all that is known of it up to `step`."""
    images = [
        EarlierImage(one.step, image_name(int(one.path.stem)), one.path, image_text(one.prompt, one.seed))
        for one in reported.samples(folder.samples, [])
        if step is not None and one.step <= step and one.path.stem.isdecimal()
    ]
    recipe = _without_secrets(config.model_dump(mode="json"))
    history = read_metrics(folder.metrics)
    return TrackedRun(config.run_name, folder.path, recipe, step or 0, step is not None, history, images, say)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_secrets(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_secrets(inner) for inner in value]
    return scrub(value) if isinstance(value, str) else value
