"""The page of one run: the report's parts, live, with curves that are drawn in the browser."""

import os
import shutil
import socket
from pathlib import Path

from daguerre import system
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.formatting import counted, format_duration, format_size
from daguerre.report import evaluations, facts, outcome
from daguerre.report.html import Html, element, join, json_script
from daguerre.report.ledger import ledger
from daguerre.report.results import results
from daguerre.report.run import Run, holder
from daguerre.serve import control as buttons
from daguerre.serve import downloads, figures, pages, pictures, settings_shown
from daguerre.serve.catalog import Catalog
from daguerre.serve.summaries import Summary
from daguerre.serve.watched import Parts, Watched

_SECTIONS = {
    "result": "Result",
    "measured": "Measured by daguerre evaluate",
    "outcome": "What came of it",
    "ledger": "Loss ledger",
    "images": "Images",
    "asked": "Images on request",
    "strengths": "With the adapter at other strengths",
    "curves": "Curves",
    "skipped": "Skipped",
    "log": "Messages",
    "files": "Checkpoints and exports",
}
_FOLDS = {"numbers": "All numbers, newest values", "config": "Config", "environment": "Environment"}
_AGAIN = {"run": "Copy", "on": "Train on"}
_LOG_BYTES = 24 << 10
_X = {"step": "updates", "samples": "samples", "training": "hours of training", "time": "hours since the start"}


def parts(watched: Watched, run: Run, summary: Summary | None, catalog: Catalog) -> Parts:
    """The parts of the page that are HTML, by name; None for what a run does not have."""
    drawn = [one for one in evaluations.charts(run) if one is not None]
    tables = evaluations.tables(run)
    return {
        "head": _head(run, summary),
        "result": results(run),
        "measured": join(tables, element("div", *drawn, class_="charts") if drawn else None) if tables else None,
        "outcome": outcome.section(run.compared),
        "ledger": ledger(run),
        "images": pictures.evolution(run),
        "asked": pictures.on_request(run),
        "strengths": pictures.by_strength(run),
        "skipped": facts.skipped(run),
        "log": _log(run.folder),
        "files": downloads.listing(run.folder, catalog),
        "numbers": facts.last_numbers(run),
        "config": settings_shown.config(run),
        "environment": facts.environment(run),
    }


def _head(run: Run, summary: Summary | None) -> Html:
    state = element("span", facts.STATES.get(run.state, run.state), class_=f"state {run.state}")
    name = summary.name if summary else run.name
    described = run.setting("description")
    return join(
        element("h1", name, " ", state),
        element("p", described, class_="description") if described else None,
        element("p", summary.note, class_="own-note") if summary and summary.note else None,
        facts.summary(run),
        element("p", " · ".join(filter(None, [facts.times(run), *_now(run, summary)])), class_="note"),
        progress(summary) if summary else None,
        *facts.notices(run),
        facts.facts(run),
    )


def _now(run: Run, summary: Summary | None) -> list[str]:
    free = shutil.disk_usage(run.folder).free
    left = summary.left_seconds if summary else None
    return [
        f"{format_duration(left)} left, without saves" if left is not None else "",
        _load(run),
        f"{format_size(free)} free on the disk",
    ]


def _load(run: Run) -> str:
    """The load of the devices on which a run trains; "" for one that does not train on this machine."""
    own = holder(run.folder)
    if run.state != "running" or own is None or own.host != socket.gethostname():
        return ""
    on_gpu = run.environment.get("gpus") and run.setting("training.device") != "cpu"
    if not on_gpu:
        return f"load {system.load():.1f} on {counted(system.cores(), 'core')}"
    each = (
        f"GPU {'' if one.busy_percent is None else f'{one.busy_percent} % busy, '}"
        f"{format_size(one.used_bytes)} of {format_size(one.total_bytes)} in use"
        for one in system.gpus()
    )
    return " · ".join(each)


def tail(path: Path) -> str:
    """The last lines of a file that people read, without signs that are not printed. OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = os.pread(file.fileno(), _LOG_BYTES, max(0, size - _LOG_BYTES))
    text = data.decode("utf-8", "replace")
    if size > _LOG_BYTES:
        text = text.partition("\n")[2]
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text).rstrip()


def _log(folder: Path) -> Html | None:
    try:
        shown = tail(RunFolder(folder).log)
    except OSError:
        return None
    return element("pre", shown, class_="log", tabindex=0, role="log") if shown else None


def progress(summary: Summary) -> Html | None:
    """A bar of the updates that are done; None where their number is not known."""
    return progress_bar(summary.step, summary.total) if summary.total else None


def progress_bar(step: int, total: int) -> Html:
    """A bar of the updates that are done."""
    return element("progress", value=min(step, total), max=total, aria_label="updates done")


def render(watched: Watched, summary: Summary | None, control: bool, starts: bool = True) -> str:
    """The whole page; `starts`: the server starts runs."""
    held, marks = watched.parts, watched.marks
    name = summary.name if summary else watched.folder.name

    def part(key: str, name: str = "div") -> Html:
        return element(name, held.get(key), data_part=key, data_mark=marks.get(key, ""))

    sections = (
        element(
            "section",
            element("h2", title),
            _curves() if key == "curves" else part(key),
            id=key,
            hidden=key != "curves" and held.get(key) is None,
        )
        for key, title in _SECTIONS.items()
    )
    folds = (
        element("details", element("summary", title), part(key), id=key, hidden=held.get(key) is None)
        for key, title in _FOLDS.items()
    )
    body = join(
        _bar(watched.id, control, starts),
        part("head", "header"),
        buttons.bar(_prompts(watched.run)) if control else None,
        element("p", _reading(watched), class_="note reading", hidden=watched.complete, role="status"),
        element("main", *sections, element("section", element("h2", "Details"), *folds, id="details")),
        element("footer", element("a", "Report as one page", href="report"), ", which needs nothing else."),
        json_script({"id": watched.id, "name": name}, id="about"),
        element("p", class_="lost-line", role="status", hidden=True),
        _notes(summary) if control and summary else None,
    )
    return pages.page(
        f"{name} · Daguerre", body, "../../", ("uplot.css", "photoswipe.css", "live.css"), ("run.js", "hover.js")
    )


def _prompts(run: Run | None) -> list[str]:
    """The prompts of a run's recipe, where they are written in it."""
    found = run.setting("sampling.prompts") if run else None
    return [str(one) for one in found] if isinstance(found, list) else []


def _bar(id: str, control: bool, starts: bool) -> Html:
    return element(
        "nav",
        element("a", "All runs", href="../../"),
        element("a", "Queue", href="../../queue/") if starts else None,
        element("a", "Compare", href="", id="compare"),
        *(element("a", text, href=f"../../queue/new?{how}={id}") for how, text in _AGAIN.items() if control and starts),
        element("button", "Tell me when it ends", type="button", id="tell", hidden=True),
        element("button", "Edit name and note", type="button", id="edit") if control else None,
        class_="bar-top",
    )


def _notes(summary: Summary) -> Html:
    """The form for what is written about a run."""
    form = element(
        "form",
        element("h2", "Name and note"),
        element("label", "Name", for_="own-name"),
        element("input", id="own-name", name="name", value=summary.name, maxlength=200),
        element("label", "Note", for_="own-note"),
        element("textarea", summary.note, id="own-note", name="note", rows=5, maxlength=4000),
        element(
            "label", element("input", type="checkbox", name="archived", checked=summary.archived), " put away (archive)"
        ),
        element("p", class_="wrong", role="alert"),
        element(
            "div",
            element("button", "Cancel", type="button", class_="cancel"),
            element("button", "Save", type="submit"),
            class_="buttons",
        ),
    )
    return element("dialog", form, id="notes")


def _reading(watched: Watched) -> str:
    return f"Reading the metrics: {100 * watched.share_read:.0f} %"


def _curves() -> Html:
    options = (element("option", text, value=name) for name, text in _X.items())
    tools = figures.tools(40, element("label", "over ", element("select", *options, id="over")))
    none = element("p", "No numbers yet: the first come with the first logging interval.", class_="note", id="none")
    return join(tools, element("div", class_="charts", id="charts"), none)
