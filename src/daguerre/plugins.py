"""Plug-ins by name: a file in a plug-in folder is a choice, and its name is the name in the recipe.

The world is closed: only the modules of our own folders can be named, so a recipe can never import
anything else. Nothing is registered anywhere; adding a file adds the choice.
"""

import difflib
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from daguerre.errors import UserError

FOLDERS = {
    "families": "families",
    "objectives": "objectives",
    "adapters": "adapters",
    "sources": "data/sources",
    "samplers": "samplers",
    "metrics": "evaluation/metrics",
    "optimizers": "training/optimizers",
    "conditions": "conditions",
    "trackers": "tracking/trackers",
    "captioners": "captioning",
}
"""Plug-in kinds and their folders in the package. A module is a plug-in when it defines `Settings`
(families, objectives, adapters, sources, optimizers, conditions, metrics, trackers, captioners) or `sample`
(samplers)."""

_MARKS = {"samplers": "def sample("}


@lru_cache(maxsize=len(FOLDERS))
def names(kind: str) -> tuple[str, ...]:
    """All choices of one kind, sorted, found by reading the folder (nothing is imported)."""
    folder = Path(__file__).parent / FOLDERS[kind]
    mark = _MARKS.get(kind, "\nclass Settings(")
    return tuple(sorted(p.stem for p in folder.glob("[!_]*.py") if mark in p.read_text(encoding="utf-8")))


def check(kind: str, name: str) -> None:
    """UserError if there is no plug-in `name`: lists what exists and the nearest name. Nothing is imported."""
    if name not in names(kind):
        near = difflib.get_close_matches(str(name), names(kind), n=1)
        hint = f". Did you mean {near[0]!r}? There are" if near else "; there are"
        raise UserError(f"there is no {name!r} in {kind}{hint}: {', '.join(names(kind))}", code="unknown")


def declared(kind: str, name: str) -> tuple[Any, ...]:
    """All that plug-ins of a kind have under `name` in their modules, each object once: what shared code must know of
    some of them, without naming one."""
    found = [getattr(find(kind, each), name, None) for each in names(kind)]
    return tuple({id(each): each for each in found if each is not None}.values())


def find(kind: str, name: str) -> ModuleType:
    """The module of the plug-in `name`. UserError as from `check`."""
    check(kind, name)
    return import_module(f"daguerre.{FOLDERS[kind].replace('/', '.')}.{name}")
