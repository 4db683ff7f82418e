"""The sinks of a run's numbers: its metrics file and the recipe's trackers, each of these in a thread of its own."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from hashlib import sha256
from typing import Any

from daguerre import plugins
from daguerre.checkpoint.atomic import to_json, write_json_atomically
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.config.config import Config
from daguerre.credentials import scrub
from daguerre.report import run as reported
from daguerre.tracking.background import Background
from daguerre.tracking.settings import LoggingSettings
from daguerre.tracking.sinks import MetricsFile, Sink, read_metrics
from daguerre.tracking.tracker import EarlierImage, TrackedRun


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

    active = {name: own for name, own in config.logging.trackers.items() if own.active}
    run = _tracked(config, folder, step, say) if active else None
    found: list[Sink] = [MetricsFile(folder.metrics)]
    for name, own in active.items():
        found.append(Background(name, partial(plugins.find("trackers", name).start, own, run), say))
    for sink in found:
        stack.callback(close, sink)
    return found


def image_name(number: int) -> str:
    """The name of a sample image in trackers, by its number among those of a save."""
    return f"samples/{number:03d}"


def image_text(prompt: str, seed: Any) -> str:
    """The text of a sample image in trackers."""
    return f"{prompt}\nseed {seed}"


def send_evaluations(trackers: Sequence[Sink], folder: RunFolder, samples: int) -> None:
    """Gives trackers the results of `daguerre evaluate` that came since the last call, each at the step whose weights
    it measures; the metrics file keeps none of them. OSError."""
    sent_file = folder.evaluations / "sent.json"
    sent = json.loads(sent_file.read_bytes()) if sent_file.is_file() else {}
    found = reported.evaluations(folder.evaluations, [])
    new = [one for one in found if sent.get(_identity(one)) != one.get("time")]
    for one in new:
        step = one["protocol"].get("step", 0)
        values = {
            f"evaluation/{table}/{row['name']}": row["value"]
            for table, body in one["tables"].items()
            for row in body["rows"]
        }
        for sink in trackers:
            sink.write(step, samples, values)
        sent[_identity(one)] = one.get("time")
    if new:
        write_json_atomically(sent_file, sent)


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
