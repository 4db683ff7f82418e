"""Configs of other trainers: which one a file is, and which of our recipes stands for one of theirs.

Only what tells them apart, from signs.yaml; the other modules of `foreign` read them.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

from daguerre.foreign.names import tables

_TABLES = tables.read(Path(__file__).parent / "signs.yaml")
RECIPES: dict[str, str] = _TABLES["recipes"]
LATER: dict[str, str] = _TABLES["later"]
TRAINERS: dict[str, list[list[str]]] = _TABLES["signs"]
NEVER: dict[str, list[str]] = _TABLES["never"]
UNREAD: dict[str, dict[str, Any]] = _TABLES["unread"]
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
    return next(iter(signed(tree)), None)


def signed(tree: Mapping[str, Any]) -> list[str]:
    """The trainers whose signs a mapping has."""
    values = _values(tree)
    inner = [value for value in tree.values() if isinstance(value, Mapping)]
    plain = {str(name).lstrip("-").replace("-", "_"): value for name, value in tree.items()}  # SimpleTuner's options
    sections = values | {key: value for each in inner for key, value in each.items()}  # of kohya's TOML
    own = {"SimpleTuner": plain, "kohya's sd-scripts": sections, "musubi-tuner": sections}
    shown = [name for name, groups in TRAINERS.items() if _shows(own.get(name, values), groups)]
    return [name for name in shown if tree.keys().isdisjoint(NEVER.get(name, ()))]


def unread(tree: Mapping[str, Any]) -> str | None:
    """A mapping of another program that no converter reads: what it is, and what to give instead; None for others."""
    values = _values(tree)
    return next((f"{what}: {row['instead']}" for what, row in UNREAD.items() if _shows(values, row["signs"])), None)


def _values(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Values at the top, and by dotted names those in sections and in members of lists."""
    below = {
        f"{name}.{key}": inner
        for name, value in tree.items()
        for section in (value if isinstance(value, list) else [value])
        if isinstance(section, Mapping)
        for key, inner in section.items()
    }
    return {str(name): value for name, value in tree.items()} | below


def _shows(values: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> bool:
    """True where all of a group are there, with the values that it names."""

    def is_there(sign: str) -> bool:
        key, _, pattern = sign.partition("=")
        return key in values and fnmatchcase(str(values[key]), pattern or "*")

    return any(all(map(is_there, group)) for group in groups)


def is_format(path: Path) -> bool:
    """True for a file in a format that no recipe has."""
    return path.suffix in FORMATS
