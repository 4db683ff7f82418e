"""Facts about a run, in words and small tables."""

from collections.abc import Iterable
from typing import Any

from daguerre.formatting import counted, format_duration, scaled
from daguerre.report.html import Html, element, join, table, when
from daguerre.report.run import LIVE, Run, waits_since
from daguerre.report.svg import format_number

STATES = {
    "running": "Training now",
    "paused": "Paused",
    "released": "Released",
    "saved": "Saved, not finished",
    "finished": "Finished",
    "failed": "Failed",
    "interrupted": "Interrupted",
    "unknown": "State unknown",
}
WAITS: dict[str, tuple[str, str, str]] = {
    "paused": ("It makes no update, and its model stays in memory.", "daguerre control RUN continue", "Go on"),
    "released": ("It is saved, and its device is free.", "daguerre train RUN", "Train on"),
}
"""What a run does that waits for a person, and what lets it go on: a command, and a button of its page."""
_COUNTS = {"B": 1e9, "M": 1e6, "k": 1e3}
_CACHED = {"images": "images", "texts": "captions"}
_OBJECTIVES = {
    "eps": "noise (eps) prediction",
    "x0": "clean-image (x0) prediction",
    "v": "v-prediction",
    "edm": "EDM's prediction",
    "flow": "flow matching",
}


def summary(run: Run) -> Html:
    """One or two sentences: what was trained on what, how long, where."""
    family, sources, objective = (run.setting(k) for k in ("model.family", "data.sources", "objective.name"))
    named = sources.values() if isinstance(sources, dict) else ()
    source = ", ".join(dict.fromkeys(str(own.get("source")) for own in named if isinstance(own, dict)))
    words: list[object] = ["A model" if family is None else join("A model of the family ", element("b", family))]
    words.append(" is being trained" if run.state in LIVE else " was trained")
    words.append(join(" on ", element("b", source)) if source else None)
    cache = run.environment.get("cache")
    halves = [what for name, what in _CACHED.items() if name in cache] if isinstance(cache, dict) else []
    words.append(f" ({' and '.join(halves)} from a cache)" if halves else None)
    words.append(f" with {_OBJECTIVES.get(objective, objective)}" if objective else None)
    step, samples = progress(run)
    done = f": {counted(samples, 'sample')} in {counted(step, 'update')}"
    words.append(done if step else ": no update yet")
    seconds = run.curves.training_seconds
    words.append(f", {format_duration(seconds)} of training" if seconds else None)
    device = hardware(run)
    words.append(f" on {device}" if device else None)
    return element("p", *words, ".", class_="summary")


def waits(state: str, since: str) -> Html:
    """Since when a run waits for a person, and what lets it go on, in a line."""
    _, command, button = WAITS[state]
    moment = element("time", when(since), datetime=since)
    return join(f"{STATES[state]} ", moment, f"; its button {button}, or ", element("code", command), ", continues it")


def progress(run: Run) -> tuple[int, int]:
    """Updates and samples, as the status or the newest line says."""
    last = run.curves
    step, samples = run.status.get("step"), run.status.get("samples")
    if isinstance(step, int) and isinstance(samples, int) and step >= last.step:
        return step, samples
    return last.step, last.samples


def hardware(run: Run) -> str:
    """The device as people call it, from environment.json."""
    gpus = run.environment.get("gpus")
    names = [str(gpu.get("name")) for gpu in (gpus if isinstance(gpus, list) else []) if isinstance(gpu, dict)]
    if names and run.setting("training.device") != "cpu":
        return names[0]  # a run of one process uses one
    cpu = run.environment.get("cpu")
    if not isinstance(cpu, dict) or not cpu.get("model"):
        return ""
    cores = cpu.get("torch_threads") or cpu.get("cores")
    return f"{cores} cores of {cpu['model']}" if isinstance(cores, int) and cores > 1 else str(cpu["model"])


def facts(run: Run) -> Html:
    """The key figures, big."""
    step, samples = progress(run)
    total = run.status.get("total_steps")
    parameters = run.environment.get("parameters")
    trained, frozen = (parameters.get(k) if isinstance(parameters, dict) else None for k in ("trained", "frozen"))
    loss, validation = run.curves.loss.value, run.curves.last("validation/loss")
    speeds = sorted(run.curves.series("perf/samples_per_second")[1])
    speed = speeds[len(speeds) // 2] if speeds else None
    seconds, memory = run.curves.training_seconds, run.curves.last("memory/peak_bytes")
    found = [
        ("Updates", f"{step:,}", f"of {total:,}" if isinstance(total, int) and total != step else ""),
        ("Samples seen", f"{samples:,}", ""),
        (
            "Parameters",
            scaled(trained, _COUNTS) if isinstance(trained, int) else None,
            f"+ {scaled(frozen, _COUNTS)} frozen" if isinstance(frozen, int) and frozen else "",
        ),
        ("Loss", None if loss is None else format_number(loss), "running mean, as in the terminal"),
        ("Validation loss", None if validation is None else format_number(validation), ""),
        ("Speed", None if speed is None else f"{speed:,.{0 if speed >= 10 else 2}f}", "samples/s, median"),
        ("Training time", format_duration(seconds) if seconds else None, ""),
        ("Peak memory", f"{memory / 2**30:.2f} GiB" if memory else None, ""),
    ]
    cells = (
        element("div", element("dt", label), element("dd", value, element("small", note)))
        for label, value, note in found
        if value is not None
    )
    return element("dl", *cells, class_="facts")


def notices(run: Run) -> list[Html]:
    """Notices at the top: why the run failed, files that could not be read."""
    found = []
    reason = str(run.status.get("reason") or "")
    if run.state == "interrupted":
        reason = reason or (
            "The process ended without a message. Run the same command again to continue from the last save."
        )
    if reason:
        state, said = STATES.get(run.state, run.state), element("p", reason)
        if run.state in WAITS:
            since = when(waits_since(run.status))
            what, command, button = WAITS[run.state]
            how = f" lets it go on; so does the button {button} on a page with --control."
            state, said = f"{state} since {since}", element("p", f"{what} ", element("code", command), how)
        found.append(element("div", element("b", state), said))
    if run.problems:
        items = (element("li", problem) for problem in run.problems)
        found.append(element("div", element("b", "Not everything could be read"), element("ul", *items)))
    return [element("div", one, class_=f"notice {run.state}") for one in found]


def skipped(run: Run) -> Html:
    """Samples left out of training, by reason, and updates that were not finite."""
    reasons = run.data.get("skipped")
    rows: list[list[object]] = []
    for reason, entry in reasons.items() if isinstance(reasons, dict) else ():
        fields = entry if isinstance(entry, dict) else {"count": entry}
        count = fields.get("count", 0)
        shown = f"{count:,}" if isinstance(count, int) else str(count)
        treated = "trained on all the same" if fields.get("kept") else "left out"
        examples = (element("code", str(example)) for example in (fields.get("examples") or [])[:5])
        rows.append([reason, treated, shown, join(*examples)])
    nonfinite = run.curves.last("learning/nonfinite_steps")
    if nonfinite:
        rows.append(["loss or gradient not finite", "update skipped", f"{nonfinite:,.0f}", ""])
    if rows:
        return table(["Reason", "", "Count", "Such as"], rows, "counts reasons")
    if not run.data and nonfinite is None:
        return element("p", "Nothing is known yet.", class_="note")
    known = [] if not run.data else ["No sample was skipped."]
    known += [] if nonfinite is None else ["Every update was finite."]
    return element("p", " ".join(known), class_="note")


def last_numbers(run: Run) -> Html | None:
    """Every metric with its newest value, those without a curve too."""
    rows: list[list[object]] = [
        [element("code", name), format_number(value) if isinstance(value, int | float) else str(value), f"{step:,}"]
        for name, (step, value) in sorted(run.curves.newest.items())
        if "/" in name
    ]
    return table(["Metric", "Newest value", "Step"], rows, "counts") if rows else None


def times(run: Run) -> str:
    """Times of the first and the newest numbers."""
    stamps = map(when, (run.curves.first_time, run.curves.last_time))
    return " – ".join(dict.fromkeys(stamp for stamp in stamps if stamp))


def environment(run: Run) -> Html | None:
    rows: list[list[object]] = [[element("code", key), value] for key, value in _flat("", run.environment)]
    return table([], rows, "plain") if rows else None


def _flat(prefix: str, value: Any) -> Iterable[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
        for i, inner in enumerate(value):
            yield from _flat(f"{prefix}.{i}", inner)
    else:
        yield prefix, " ".join(map(str, value)) if isinstance(value, list) else str(value)
