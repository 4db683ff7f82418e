"""Configs of other trainers: which one a file is, and which of our recipes stands for one of theirs.

Only what tells them apart, from foreign.yaml; `config_import` reads them.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

from daguerre.config.aliases import names

_TABLES = names.read("foreign.yaml")
RECIPES: dict[str, str] = _TABLES["recipes"]
LATER: dict[str, str] = _TABLES["later"]
TRAINERS: dict[str, list[list[str]]] = _TABLES["signs"]
FORMATS = (".toml", ".env", ".sh")
"""Formats of files in which recipes are never written."""


def stands_for(name: str) -> str | None:
    """The shipped recipe that stands for a file of another trainer, None for any other name."""
    parts = PurePath(name).parts
    ends = {PurePath(theirs).parts: ours for theirs, ours in RECIPES.items()}
    return next((ours for theirs, ours in ends.items() if parts[-len(theirs) :] == theirs), None)


def later(name: str) -> str | None:
    """The reason why no recipe stands for a file of another trainer; None for any other name."""
    file = PurePath(name).name
    return next((why for pattern, why in LATER.items() if fnmatchcase(file, f"{pattern}.y*ml")), None)


def trainer(tree: Mapping[str, Any]) -> str | None:
    """The trainer whose config a mapping is; None for a recipe of ours and for what is nobody's."""
    inner = {name: value for name, value in tree.items() if isinstance(value, Mapping)}
    dotted = {*tree, *(f"{name}.{key}" for name, value in inner.items() for key in value)}
    plain = {str(name).lstrip("-").replace("-", "_") for name in tree}  # SimpleTuner's options
    sections = plain | {key for value in inner.values() for key in value}  # of kohya's TOML
    for name, groups in TRAINERS.items():
        known = {"SimpleTuner": plain, "kohya's sd-scripts": sections}.get(name, dotted)
        if any(known.issuperset(group) for group in groups):
            return name
    return None


def is_format(path: Path) -> bool:
    """True for a file in a format that no recipe has."""
    return path.suffix in FORMATS
