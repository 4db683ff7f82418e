"""The table of which recipe trains on which card, as Markdown, from the line Hardware of the recipes' headers.

What a header says of a card is held to `daguerre plan` by tests/test_recipes_docs.py.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from daguerre import trees
from daguerre.config import recipe

CARDS_GB = (8, 12, 16, 24, 32, 48, 80)
"""Memory of the cards of the table, as they are sold: a card of 8 GB has 8 x 2^30 bytes."""
EIGHT = 8
"""Devices of one node over which the table has the larger recipes."""
_OPTION = re.compile(r"\bof (\d+) GB(?: \([^)]*\))?(?: with ((?:these and )?(?:[\w.]+=\S+ ?)+))?")
_MEMORY = re.compile(r"= (\d+) GB")


class Option(NamedTuple):
    """A card that a recipe has room on, and the settings with which it has."""

    card_gb: int
    settings: str
    """Overrides as on a command line; empty for the recipe as it is."""


def options(path: Path) -> list[Option]:
    """The cards that the header of a recipe names, the recipe as it is first; [] for one that needs none."""
    return _options(line(path, "Hardware"))


def over_several(path: Path) -> Option | None:
    """The cards over EIGHT of which the header of a recipe says how it is trained; None for one that does not say."""
    return next(iter(_options(line(path, "Devices"))), None)


def _options(text: str) -> list[Option]:
    found: list[Option] = []
    for size, given in _OPTION.findall(text):
        settings = " ".join(word.rstrip(",;") for word in given.split())
        if settings.startswith("these and "):
            settings = f"{found[-1].settings} {settings.removeprefix('these and ')}"
        found.append(Option(int(size), settings))
    return found


def line(path: Path, name: str) -> str:
    """A line of a header with those that continue it; empty for a header that lacks it."""
    words: list[str] = []
    for comment in _comments(path):
        if re.match(r"\w+:", comment) and words:
            break
        if comment.startswith(f"{name}:") or words:
            words.append(comment)
    return " ".join(words)


def table() -> str:
    """The table with its numbered settings."""
    rows, notes = list[str](), dict[str, int]()
    for family, each in _by_family().items():
        for name, path in each.items():
            cells = [_cell(options(path), card_gb, notes) for card_gb in CARDS_GB]
            many = over_several(path)
            cells.append(f"{many.card_gb} GB with {_note(many.settings, notes)}" if many else "")
            memory = match[1] if (match := _MEMORY.search(line(path, "Memory"))) else ""
            rows.append(f"| `{family}` | `{name}` | {memory} | {' | '.join(cells)} |")
    cards = " | ".join(f"{card_gb} GB" for card_gb in CARDS_GB)
    head = [f"| family | recipe | needs GB | {cards} | {EIGHT} of |", f"|{'---|' * (len(CARDS_GB) + 4)}"]
    return "\n".join([*head, *rows, "", *(f"{number}. `{settings}`" for settings, number in notes.items())])


def _cell(known: list[Option], card_gb: int, notes: dict[str, int]) -> str:
    """The first of the options that has room: headers have the recipe as it is first, then what changes it more."""
    settings = next((option.settings for option in known if option.card_gb <= card_gb), None)
    if settings is None:
        return "-"
    return f"with {_note(settings, notes)}" if settings else "yes"


def _note(settings: str, notes: dict[str, int]) -> int:
    """The number of these settings below the table."""
    return notes.setdefault(settings, len(notes) + 1)


def _by_family() -> Mapping[str, Mapping[str, Path]]:
    """The recipes that name a card and train, by family."""
    found: dict[str, dict[str, Path]] = {}
    for name, path in recipe.shipped().items():
        tree = recipe.tree(name)
        if (options(path) or over_several(path)) and str(trees.get(tree, "training.duration")) != "0 steps":
            found.setdefault(str(trees.get(tree, "model.family")), {})[name] = path
    return dict(sorted(found.items()))


def _comments(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return
        yield line.removeprefix("#").strip()
