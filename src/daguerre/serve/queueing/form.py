"""The form of a new run: the settings of a recipe with their documentation, the overrides as YAML next to it."""

import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from daguerre import trees
from daguerre.config import recipe
from daguerre.config.fields import summary
from daguerre.queue.runner import devices_of_this_machine
from daguerre.report.html import Html, element, join, json_script
from daguerre.serve import pages
from daguerre.serve.queueing.drafts import Draft, Meant, as_text, as_yaml, changed, mean, overrides, shortened
from daguerre.serve.queueing.schema import Setting
from daguerre.serve.site import Site

_MOST_USED = (
    *("run_name", "data.source", "data.path", "training.duration", "optimizer.learning_rate"),
    *("training.global_batch_size", "data.resolution", "sampling.prompts", "checkpoint.every", "init_from", "seed"),
)
_READING = "Reading the settings: the first time with a version of Daguerre this takes ten seconds and more ..."
_LONG = 60
"""Signs of a value beyond which its box has several lines."""


def render(choice: Mapping[str, Any], title: str, files: Collection[str]) -> str:
    """The page; `choice` is where the draft begins: recipe or run, and its YAML; `files` are recipes of the folder."""
    names = (*files, *recipe.shipped())
    options = (element("option", name, value=name, selected=name == choice["recipe"]) for name in names)
    start = (
        element("p", join(*_start(choice, title)), class_="summary")
        if choice["run"]
        else join(
            element("p", element("label", "Recipe ", element("select", *options, id="recipe")), class_="tools"),
            element("p", class_="summary", id="description"),
        )
    )
    form = element(
        "main",
        element(
            "div",
            element(
                "input",
                type="search",
                id="search",
                placeholder="Search all settings",
                aria_label="Search all settings",
            ),
            element("span", class_="note", id="found", role="status"),
            class_="tools",
        ),
        element("div", element("p", _READING, class_="note"), id="settings"),
        class_="settings",
    )
    body = join(
        element("nav", element("a", "All runs", href="../"), element("a", "Queue", href="./"), class_="bar-top"),
        element("header", element("p", "Daguerre · new run", class_="kicker"), element("h1", title), start),
        element("div", form, _side(choice), class_="new-run"),
        json_script(dict(choice), id="about"),
        element("p", class_="lost-line", role="status", hidden=True),
    )
    return pages.page(f"{title} · Daguerre", body, "../", ("live.css",), ("new.js",))


def _start(choice: Mapping[str, Any], title: str) -> list[object]:
    if choice["goes_on"]:
        return ["The run goes on in its folder, with what is changed here."]
    return ["A new run with the settings of ", element("a", choice["name"], href=f"../run/{choice['run']}/"), "."]


def _side(choice: Mapping[str, Any]) -> Html:
    count = len(devices_of_this_machine())
    devices = element("input", type="number", id="devices", min=1, max=count, value=1)
    return element(
        "aside",
        element("h2", element("label", "Changes, as YAML", for_="yaml")),
        element("textarea", choice["yaml"], id="yaml", rows=10, spellcheck="false", autocapitalize="off"),
        element("p", class_="wrong", id="wrong", role="alert"),
        element("p", element("label", "On ", devices, " GPUs together"), class_="tools") if count > 1 else None,
        element(
            "div",
            element("button", "Check and plan", type="button", id="check"),
            element("button", "Try ten updates", type="button", id="try"),
            element("button", "Add to the queue", type="button", id="add"),
            element("span", class_="note", id="doing", role="status"),
            class_="tools go",
        ),
        element("div", id="plan"),
        element("details", element("summary", "As a command"), element("pre", id="command", tabindex=0)),
        element("details", element("summary", "What train says"), element("pre", id="said", tabindex=0), hidden=True),
    )


def document(site: Site, draft: Draft) -> dict[str, Any]:
    """The answer to a draft: its YAML with what was changed in the form, the groups of the form, mistakes that are seen
    without torch, and the command. UserError for a draft that cannot be read."""
    found = overrides(draft.yaml)
    meant = mean(site, draft, found)
    settings = site.schema.settings(meant.tree)
    if draft.change:
        known = {shortened(each.path, meant.tree): each for each in settings}
        meant = mean(site, draft, changed(found, draft.change, known))
        settings = site.schema.settings(meant.tree)
    about = meant.tree.get("description")
    return {
        "yaml": as_yaml(meant.overrides) if draft.change else None,
        "groups": rows(settings, meant),
        "problems": [[problem.path, problem.text] for problem in meant.problems],
        "command": shlex.join(["daguerre", "train", *meant.words]),
        "about": about if isinstance(about, str) else "",
    }


def rows(settings: list[Setting], meant: Meant) -> list[dict[str, Any]]:
    """The groups of the form: the title of each, whether it is open, and its settings as HTML by their paths."""
    found = {shortened(each.path, meant.tree): each for each in settings}
    own = [
        path for path, each in found.items() if path in _MOST_USED or path in meant.overrides or _is_own(each, meant)
    ]
    own.sort(key=lambda path: _MOST_USED.index(path) if path in _MOST_USED else len(_MOST_USED))
    groups: dict[str, list[str]] = {}
    for path in found:
        if path not in own:
            groups.setdefault(path.partition(".")[0] if "." in path else "run", []).append(path)
    titles = {"": own, **groups}
    return [
        {"title": title, "rows": [[path, _row(path, found[path], meant)] for path in paths]}
        for title, paths in titles.items()
        if paths
    ]


def _is_own(each: Setting, meant: Meant) -> bool:
    """True for a setting that the recipe gives otherwise than it is by default."""
    value = trees.get(meant.base, each.path)
    return value is not trees.ABSENT and value != each.default


def _row(path: str, each: Setting, meant: Meant) -> Html:
    value, base = (trees.get(tree, each.path) for tree in (meant.tree, meant.base))
    default = base if base is not trees.ABSENT else each.default
    given = path in meant.overrides or (value is not trees.ABSENT and value != base)
    text = as_text(value) if value is not trees.ABSENT else ""
    id = f"set-{path}"
    label = element("label", element("code", path), for_=id)
    back = element("button", "take back", type="button", class_="back", aria_label=f"take back {path}")
    doc = " ".join(each.about.split())
    first = summary(doc)
    return element(
        "div",
        element("div", label, back if given else None, class_="name"),
        _box(id, path, each, text, "" if default is None else as_text(default)),
        element("p", *_marked(f"{first}."), class_="note") if first else None,
        element("details", element("summary", "more"), element("p", *_marked(doc), class_="note"))
        if len(doc) > len(first) + 2
        else None,
        element("p", class_="wrong", role="alert", hidden=True),
        class_="setting given" if given else "setting",
        data_path=path,
        data_search=f"{path} {doc}".lower(),
    )


def _marked(text: str) -> list[object]:
    """A text whose parts in backticks are code."""
    return [element("code", part) if number % 2 else part for number, part in enumerate(text.split("`"))]


def _box(id: str, path: str, each: Setting, text: str, default: str) -> Html:
    if each.choices:
        chosen = text or default
        known = each.choices if chosen in each.choices or not chosen else (chosen, *each.choices)
        empty = () if chosen else (element("option", "choose", value=""),)
        options = (element("option", one, value=one, selected=one == chosen) for one in known)
        return element("select", *empty, *options, id=id, name=path)
    shown = text or default
    if each.kinds & {"array", "object"} or len(shown) > _LONG or "\n" in shown:
        return element("textarea", text, id=id, name=path, rows=2, placeholder=default, spellcheck="false")
    mode = "decimal" if each.kinds <= {"number", "integer", "null"} else None
    return element("input", type="text", id=id, name=path, value=text, placeholder=default, inputmode=mode)


def free_name(folder: Path) -> str:
    """A name for a copy of a run that no folder next to it has."""
    number = 2
    while (folder.parent / f"{folder.name}-{number}").exists():
        number += 1
    return f"{folder.name}-{number}"
