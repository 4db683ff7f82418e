"""The list of runs: a row for each, which says how it stands."""

import re
import shutil

import yaml

from daguerre.checkpoint.run_dir import RunFolder
from daguerre.formatting import counted, format_duration, format_size
from daguerre.report.facts import STATES, WAITS, waits
from daguerre.report.html import Html, element, join, when
from daguerre.report.run import MOST_BYTES, SAFE_LOADER
from daguerre.report.svg import format_number
from daguerre.serve import pages, summaries
from daguerre.serve.bounds import check_file
from daguerre.serve.catalog import Catalog, Entry
from daguerre.serve.run_page import progress
from daguerre.serve.settings_shown import flat, shown

_CONDITION = re.compile(r"([\w.]+)(>=|<=|!=|=|>|<)(.*)")


def render(catalog: Catalog, control: bool = False) -> str:
    """The page; with `control` runs are started there, unless they are in a store."""
    entries, is_far = catalog.summed_up(), catalog.copies is not None
    free = shutil.disk_usage(catalog.folder).free
    places = {"queue/": "Queue", "queue/new": "New run" * control, "data/": "Pictures"}
    links = (element("a", text, href=place) for place, text in places.items() if text and not is_far)
    nav = element("nav", *links, class_="bar-top")
    header = element(
        "header",
        element("p", "Daguerre · runs", class_="kicker"),
        element("h1", catalog.name),
        element("p", f"{format_size(free)} free on the disk", class_="note") if not is_far else None,
        element("p", catalog.problem(), class_="note reason", id="problem", role="status", hidden=not catalog.problem())
        if is_far
        else None,
    )
    tools = element(
        "div",
        element(
            "input",
            type="search",
            id="filter",
            placeholder="text, or setting: optimizer.learning_rate<1e-3",
            aria_label="Filter by text or by settings",
        ),
        element("label", element("input", type="checkbox", id="archived"), " archived"),
        element("button", "Compare", type="button", id="compare", disabled=True),
        element("span", _count(entries), class_="note", id="count", role="status"),
        class_="tools",
    )
    none = element("p", *_no_runs(catalog, control), class_="summary", id="none", hidden=bool(entries))
    rows = element("div", *(row(one) for one in entries), class_="runs", id="runs")
    body = join(
        nav, header, element("main", tools, none, rows), element("p", class_="lost-line", role="status", hidden=True)
    )
    return pages.page(f"{catalog.name} · Daguerre", body, "", ("live.css",), ("list.js",))


def _no_runs(catalog: Catalog, control: bool) -> list[Html | str]:
    if catalog.copies:
        return [f"No run below {catalog.name} is read yet: those that are there appear one after the other."]
    if control:
        pictures = element("a", "add pictures of your own", href="data/")
        return ["No runs here yet: ", pictures, ", or ", element("a", "start a run of a recipe", href="queue/new"), "."]
    trains = element("code", "daguerre train quickstart")
    return ["No runs here yet. ", trains, " trains one; this page shows it as it begins."]


def _count(entries: list[Entry]) -> str:
    running = sum(one.summary is not None and one.summary.state == "running" for one in entries)
    return f"{counted(len(entries), 'run')}, {running} training now"


def row(entry: Entry) -> Html:
    """A run of the list. Its cells are replaced one by one, those that say something new."""
    found = entry.summary
    assert found is not None
    state = element("span", STATES.get(found.state, found.state), class_=f"state {found.state}")
    link = element("a", found.name, href=f"run/{entry.id}/")
    said = waits(found.state, found.since) if found.state in WAITS else found.reason
    reason = element("p", said, class_="note reason") if said else None
    note = element("p", found.note, class_="own-note") if found.note else None
    cells = [
        element("div", *_pictures(entry), class_="cell pictures"),
        element("div", element("h2", link, " ", state), note, reason, class_="cell title"),
        element("div", progress(found), _steps(found), class_="cell done"),
        element("div", _number(found.loss), element("small", "loss"), class_="cell number"),
        element("div", _number(found.speed), element("small", "samples/s"), class_="cell number"),
        element("div", when_short(found.updated), element("small", "changed"), class_="cell number time"),
    ]
    box = element("input", type="checkbox", class_="pick", value=entry.id, aria_label=f"choose {found.name} to compare")
    return element("article", box, *cells, id=f"run-{entry.id}", class_="archived" if found.archived else None)


def _pictures(entry: Entry) -> list[Html]:
    found = entry.summary
    assert found is not None
    return [
        element("img", src=f"run/{entry.id}/image/{found.picture_step}/{i}/small", alt="", loading="lazy")
        for i in range(found.pictures)
    ]


def _steps(found: summaries.Summary) -> Html:
    of = f" of {found.total:,}" if found.total else ""
    left = f"{format_duration(found.left_seconds)} left" if found.left_seconds is not None else None
    return join(element("small", f"{found.step:,}{of} updates"), element("small", left) if left else None)


def _number(value: float | None) -> Html:
    return element("b", "–" if value is None else format_number(value))


def when_short(seconds: float) -> Html:
    """A time that the browser turns into how long ago that is."""
    moment = summaries.iso(seconds)
    return element("time", when(moment), datetime=moment)


class Settings:
    """Settings of many runs, read when they are asked for and kept while their files stay."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._kept: dict[str, tuple[object, dict[str, object]]] = {}

    def matching(self, text: str) -> list[str]:
        """Ids of the runs that a text finds: each of its words is a part of the name, state, note or description, or
        compares a setting, as in `optimizer.learning_rate<1e-3`; the last parts of a setting's name do."""
        words = text.lower().split()
        return [one.id for one in self.catalog.summed_up() if all(self._fits(one, word) for word in words)]

    def _fits(self, entry: Entry, word: str) -> bool:
        found = entry.summary
        assert found is not None
        if match := _CONDITION.fullmatch(word):
            name, how, wanted = match.groups()
            values = [
                value
                for path, value in self.of(entry).items()
                if path.lower() == name or path.lower().endswith(f".{name}")
            ]
            return any(_compares(value, how, wanted) for value in values)
        texts = [found.name, found.state, STATES.get(found.state, ""), found.note, entry.folder.name]
        if any(word in text.lower() for text in texts):
            return True
        own = self.of(entry)
        return any(word in str(own.get(path, "")).lower() for path in ("description", "model.family"))

    def of(self, entry: Entry) -> dict[str, object]:
        """All settings of a run, by path; {} where its config cannot be read."""
        path = RunFolder(entry.folder).config
        try:
            check_file(path, self.catalog.roots, MOST_BYTES)
            stat = path.stat()
            mark = stat.st_mtime_ns, stat.st_size
            if self._kept.get(entry.id, (None, {}))[0] != mark:
                self._kept[entry.id] = mark, flat(yaml.load(path.read_bytes(), SAFE_LOADER))
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            return {}
        return self._kept[entry.id][1]


def _compares(value: object, how: str, wanted: str) -> bool:
    """True if a setting's value stands in this relation to a text: as numbers where both are."""
    one: float | str
    other: float | str
    try:
        one, other = float(str(value)), float(wanted)
    except ValueError:
        one, other = shown(value).lower(), wanted
    if how in ("=", "!="):
        return (one == other) == (how == "=")
    if isinstance(one, str):
        return False
    assert isinstance(other, float)
    return {"<": one < other, ">": one > other, "<=": one <= other, ">=": one >= other}[how]
