"""Settings of runs for people: the config, what it has otherwise than its recipe, and differences of several runs."""

import json
from collections.abc import Mapping
from typing import Any

from daguerre import yaml_text
from daguerre.config import recipe
from daguerre.errors import UserError
from daguerre.report.html import Html, element, join, table
from daguerre.report.page import config_text
from daguerre.report.run import Run

_MOST = 5000
"""Settings of one run; a forged config may unfold to any number of them."""
_OWN = ("run_name", "description", "output_dir")
"""Settings that name a run."""


def flat(tree: Any) -> dict[str, Any]:
    """Settings by their dotted paths; lists are values."""
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [("", tree)]
    while waiting and len(found) < _MOST:
        path, value = waiting.pop()
        if isinstance(value, dict) and value:
            waiting += [(f"{path}.{key}" if path else str(key), inner) for key, inner in reversed(value.items())]
        elif path:
            found[path] = value
    return found


def shown(value: Any) -> str:
    """A value as YAML has it, in a line that fits a table."""
    text = json.dumps(value, default=str) if isinstance(value, bool | dict | list | None) else str(value)
    return text if len(text) <= 200 else f"{text[:199]}…"


def from_recipe(run: Run) -> tuple[str, dict[str, tuple[Any, Any]]]:
    """The name of the shipped recipe that a run was started from, and what the run has otherwise: the recipe's value
    and the run's. Recipes of other files are not opened: the name of one comes from the run folder."""
    name = next((word for word in _command(run)[1:] if word in recipe.shipped()), "")
    if not name:
        return "", {}
    try:
        theirs = flat(yaml_text.resolve(recipe.tree(name), {}, name)[0])
    except UserError:
        return "", {}
    own = flat(run.config)
    return name, {path: (value, own[path]) for path, value in theirs.items() if path in own and own[path] != value}


def _command(run: Run) -> list[str]:
    command = run.environment.get("command")
    return [str(word) for word in command] if isinstance(command, list) else []


def config(run: Run) -> Html | None:
    """The config of a run, below what it has otherwise than its recipe and what its command gave."""
    if not run.config_text:
        return None
    name, differences = from_recipe(run)
    rows: list[list[object]] = [
        [element("code", path), shown(theirs), shown(own)] for path, (theirs, own) in differences.items()
    ]
    given = [word for word in _command(run) if "=" in word]
    return join(
        element("p", "Given by the command: ", *(join(element("code", word), " ") for word in given))
        if given
        else None,
        table(["Setting", f"Recipe {name}", "This run"], rows, "counts differs") if rows else None,
        element("p", f"All settings of the recipe {name} are as it has them.", class_="note")
        if name and not rows
        else None,
        element("pre", config_text(run.config_text), tabindex=0),
    )


def differences(configs: Mapping[str, Mapping[str, Any]]) -> Html:
    """A table of the settings in which runs differ, a column for each run, by name."""
    trees = {name: flat(tree) for name, tree in configs.items()}
    paths = dict.fromkeys(path for tree in trees.values() for path in tree)
    rows: list[list[object]] = []
    for path in paths:
        values = [shown(tree[path]) if path in tree else "" for tree in trees.values()]
        if len(set(values)) > 1 and path not in _OWN:
            rows.append([element("code", path), *values])
    if not rows:
        return element("p", "Their settings are equal.", class_="note")
    return table(["Setting", *trees], rows, "counts differs")
