"""The page of the queue: what trains, what waits in which order, and how the others ended."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from daguerre.checkpoint.actions import PAUSED
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.errors import UserError
from daguerre.queue.queue import Listed, Queue, State
from daguerre.report.facts import STATES, waits
from daguerre.report.html import Html, element, join, when
from daguerre.report.run import waits_since
from daguerre.serve import pages
from daguerre.serve.catalog import Catalog, identity
from daguerre.serve.run_page import progress_bar, tail
from daguerre.serve.summaries import iso

_STATES: dict[State, str] = {
    "waiting": "Waiting",
    "paused": "Held back",
    "running": "Training now",
    "finished": "Finished",
    "stopped": "Stopped",
    "failed": "Failed",
    "interrupted": "Interrupted",
}
GROUPS: dict[str, tuple[str, tuple[State, ...]]] = {
    "running": ("Training now", ("running",)),
    "waiting": ("Next", ("waiting", "paused")),
    "ended": ("Ended", ("finished", "failed", "interrupted", "stopped")),
}
"""The lists of the page by name: their titles, and the states in them."""
_BUTTONS: dict[State, tuple[str, ...]] = {
    "waiting": ("up", "down", "pause", "remove"),
    "paused": ("up", "down", "resume", "remove"),
    "running": ("pause", "stop"),
    "finished": ("remove",),
    "stopped": ("resume", "remove"),
    "failed": ("resume", "remove"),
    "interrupted": ("resume", "remove"),
}
_WORDS = {
    "up": ("↑", "Up: starts earlier"),
    "down": ("↓", "Down: starts later"),
    "pause": ("Hold", "It is not started until it may go on"),
    "resume": ("Go on", "Starts it, or goes on from its newest checkpoint, when a device is free"),
    "stop": ("Stop", "Saves and ends"),
    "kill": ("Kill", "Ends it at once; what it saved before stays"),
    "remove": ("Remove", "Takes it out of the queue; the folder of its run stays"),
}
_OF_RUNNING = {"pause": ("Pause", "Saves, frees its device and waits until it may go on")}


@dataclass(frozen=True)
class Shown:
    """The queue as a page shows it: rows by the ids of entries, in each list in its order."""

    rows: dict[str, Html]
    lists: dict[str, list[str]]
    paused: bool
    is_run: bool
    """Whether a process starts what waits."""


def shown(queue: Queue, catalog: Catalog, control: bool) -> Shown:
    """The queue as it is now."""
    listed = queue.entries()
    lists = {name: [each.ident for each in listed if each.state in states] for name, (_, states) in GROUPS.items()}
    lists["ended"].reverse()
    rows = {each.ident: _row(each, queue, catalog, control) for each in listed}
    return Shown(rows, lists, queue.is_paused, queue.is_run)


def render(queue: Queue, catalog: Catalog, control: bool) -> str:
    """The page."""
    now = shown(queue, catalog, control)
    text, pressed = ("Go on with the queue", "true") if now.paused else ("Pause the queue", "false")
    pause = element("button", text, type="button", id="pause-all", aria_pressed=pressed) if control else None
    sections = (
        element(
            "section",
            element("h2", title),
            element("div", *(now.rows[ident] for ident in now.lists[name]), class_="queue", id=name),
            hidden=not now.lists[name],
        )
        for name, (title, _) in GROUPS.items()
    )
    body = join(
        element(
            "nav",
            element("a", "All runs", href="../"),
            element("a", "New run", href="new") if control else None,
            class_="bar-top",
        ),
        element(
            "header", element("p", "Daguerre · queue", class_="kicker"), element("h1", "Queue"), _said(now, control)
        ),
        element("div", pause, element("span", class_="note", id="answer", role="status"), class_="tools"),
        element("main", _none(now, control), *sections, data_control="1" if control else None),
        element("p", class_="lost-line", role="status", hidden=True),
    )
    return pages.page("Queue · Daguerre", body, "../", ("live.css",), ("queue.js",))


def words(now: Shown, control: bool) -> str:
    """Says in a sentence what the queue does."""
    if now.paused:
        return "The queue is paused: what trains goes on, and nothing else is started."
    if now.is_run:
        return "One run after the other, on each device one at a time. What fails frees its device for the next."
    other = "" if control else ", and so does this page with --control"
    return f"Nothing starts what waits now: daguerre queue run does{other}."


def _said(now: Shown, control: bool) -> Html:
    return element("p", words(now, control), class_="summary", id="said")


def _none(now: Shown, control: bool) -> Html:
    add = join("A ", element("a", "new run", href="new"), " starts here, or ") if control else None
    return element(
        "p",
        "The queue is empty. ",
        add,
        element("code", "daguerre queue add RECIPE"),
        " puts one here.",
        class_="summary",
        id="none",
        hidden=bool(now.rows),
    )


def _row(each: Listed, queue: Queue, catalog: Catalog, control: bool) -> Html:
    kind, word, said = each.state, _STATES[each.state], element("span", each.why) if each.why else None
    if each.state == "running" and each.why == PAUSED:  # in memory, which frees no device
        kind, word = "paused", STATES["paused"]
        said = waits(kind, waits_since(each.status))
    state = element("span", word, class_=f"state {kind}")
    name, address = Path(each.entry.place).name, _address(each, catalog)
    title = element("a", name, href=address) if address else name
    why = element("p", said, class_="note reason") if said else None
    log = element("a", "what it printed", href=f"entry/{each.ident}/log") if each.log.exists() else None
    facts = [_devices(each, queue), join("added ", element("time", when(iso(each.entry.added)))), log]
    split = (part for fact in facts if fact for part in (" · ", fact))
    return element(
        "article",
        element("div", element("h3", title, " ", state), why, _command(each), _progress(each), class_="title"),
        element("div", *_buttons(each), class_="buttons") if control else None,
        element("p", each.ident, *split, class_="note facts-line"),
        id=f"entry-{each.ident}",
    )


def _command(each: Listed) -> Html:
    recipe, *given = each.entry.words
    return element("p", element("b", recipe), *(join(" ", element("code", shlex.quote(word))) for word in given))


def _progress(each: Listed) -> Html | None:
    step, total = each.status.get("step"), each.status.get("total_steps")
    if not (isinstance(step, int) and isinstance(total, int) and total > 0) or each.state in ("waiting", "finished"):
        return None
    done = element("small", f"{step:,} of {total:,} updates")
    return element("div", progress_bar(step, total), done, class_="done")


def _devices(each: Listed, queue: Queue) -> str:
    if each.state != "running":
        return f"on {each.entry.devices} devices" if each.entry.devices > 1 else ""
    given = queue.document(each.ident, "devices").get("devices")
    names = [str(one) for one in given if one] if isinstance(given, list) else []
    return f"on GPU {', '.join(names)}" if names else ""


def _address(each: Listed, catalog: Catalog) -> str:
    """The page of its run, from that of the queue; "" for a run that is not shown, or has no folder yet."""
    folder = Path(each.entry.place)
    if catalog.folder not in folder.parents or not RunFolder(folder).config.is_file():
        return ""
    id = identity(folder, catalog.folder)
    return f"../run/{id}/" if id in catalog.entries or catalog.at(id) is not None else ""


def _buttons(each: Listed) -> list[Html]:
    found = []
    for do in _BUTTONS[each.state]:
        kind = "kill" if do == "stop" and each.entry.stops else do
        text, title = (_OF_RUNNING if each.state == "running" else _WORDS).get(kind, _WORDS[kind])
        label = f"{title.partition(':')[0] if len(text) == 1 else text}: {Path(each.entry.place).name}"
        found.append(element("button", text, type="button", data_do=kind, title=title, aria_label=label))
    return found


def log(queue: Queue, ident: str) -> str:
    """The end of what an entry has printed. UserError for no entry, and for one that has printed nothing yet."""
    found = queue.get(ident)
    try:
        return tail(found.log)
    except OSError:
        raise UserError(f"{found.ident} has not been started yet", code="missing") from None
