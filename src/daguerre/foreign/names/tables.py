"""Names of other trainers as data, read from names.yaml and later.yaml, which say what each table is."""

from pathlib import Path
from typing import Any

import yaml

OFF = ("false", "none", "null", "")
"""Values of a switch that ask for nothing."""


def _spread(table: dict[str, Any]) -> dict[str, Any]:
    """One row for each of several names."""
    return {name: row for names, row in table.items() for name in names.split(", ")}


def _parts(rows: dict[str, Any]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """(part, values that ask for nothing) by the name that asks for the part."""
    listed = {name: row if isinstance(row, list) else [row] for name, row in rows.items()}
    return {name: (part, tuple(dict.fromkeys((*off, *OFF)))) for name, (part, *off) in listed.items()}


def read(path: Path) -> dict[str, Any]:
    """The tables of a file, all of them text."""
    document: dict[str, Any] = yaml.load(path.read_text("utf-8"), getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    return document


_NAMES, _LATER = (read(Path(__file__).parent / name) for name in ("names.yaml", "later.yaml"))
SAME: dict[str, str] = _spread(_NAMES["same"])
BELOW: dict[str, str] = _NAMES["below"]
CONVERTED: dict[str, list[Any]] = _spread(_NAMES["converted"])
REFUSED: dict[str, str] = _spread(_NAMES["refused"])
NOTICES: dict[str, str] = _spread(_NAMES["notices"])
BESIDE: dict[str, tuple[str, str, str]] = _NAMES["beside"]
FLAGS = frozenset(name for names in _NAMES["flags"] for name in names)
WORDS, PAIRS = frozenset(_NAMES["words"]), frozenset(_NAMES["pairs"])
PARTS: dict[str, list[str]] = _LATER["parts"]
LATER = _parts(_spread(_LATER["rows"]))
