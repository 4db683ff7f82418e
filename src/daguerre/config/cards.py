"""The tables of docs/recipes.md, as Markdown, from the recipes' headers: what each trains, and on which card.

What a header says of a card is held to `daguerre plan` by tests/test_recipes_docs.py.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
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
        if words and (not comment or re.match(r"[A-Z][a-z]+:", comment)):
            break
        if comment.startswith(f"{name}:") or words:
            words.append(comment)
    return " ".join(words)


def tables() -> str:
    """The recipes that need no card, those of real models, and the cards of these, each under its heading."""
    return f"## Small models\n\n{_small()}\n\n## Real models\n\n{_real()}\n\n## Cards\n\n{_cards()}"


def _small() -> str:
    """Recipes that need no card, with the first sentences of what their headers say of time and result."""
    rows = [
        [f"`{name}`", _what(path), _short(path, "Hardware"), _short(path, "Time"), _sentence(_said(path, "Result"))]
        for name, path in recipe.shipped().items()
        if not _needs_card(path)
    ]
    return _table(["recipe", "what it is", "needs", "time", "result"], rows)


def _real() -> str:
    rows = []
    for family, each in _by_family().items():
        for name, path in each.items():
            objective, px = (trees.get(recipe.tree(name), of) for of in ("objective.name", "data.resolution"))
            rows.append([f"`{family}`", f"`{name}`", _what(path), f"`{objective}`", f"{px} px"])
    return _table(["family", "recipe", "what it is", "objective", "images"], rows)


def _cards() -> str:
    """The table of cards with its numbered settings."""
    rows, notes = [], dict[str, int]()
    for family, each in _by_family().items():
        for name, path in each.items():
            if str(trees.get(recipe.tree(name), "training.duration")) != "0 steps":
                cells = [_cell(options(path), card_gb, notes) for card_gb in CARDS_GB]
                many = over_several(path)
                cells.append(f"{many.card_gb} GB with {_note(many.settings, notes)}" if many else "")
                memory = match[1] if (match := _MEMORY.search(line(path, "Memory"))) else ""
                rows.append([f"`{family}`", f"`{name}`", memory, *cells])
    head = ["family", "recipe", "needs GB", *(f"{card_gb} GB" for card_gb in CARDS_GB), f"{EIGHT} of"]
    return "\n".join([_table(head, rows), "", *(f"{number}. `{settings}`" for settings, number in notes.items())])


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _what(path: Path) -> str:
    """The first sentence of a recipe."""
    return _sentence(" ".join(takewhile(bool, _comments(path))))


def _said(path: Path, name: str) -> str:
    return line(path, name).partition(":")[2].strip()


def _short(path: Path, name: str) -> str:
    """The part of a line of a header before its details."""
    return re.split(r"[:;]| \(", _sentence(_said(path, name)))[0]


def _sentence(text: str) -> str:
    """The first sentence of a text, as a cell of a table. Numbers and names of files have points inside."""
    return re.split(r"\.(?= [A-Z(]|$)", text)[0].replace("|", r"\|").replace("<", r"\<")


def _needs_card(path: Path) -> bool:
    return bool(options(path) or over_several(path))


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
    """The recipes that name a card, by family."""
    found: dict[str, dict[str, Path]] = {}
    for name, path in recipe.shipped().items():
        if _needs_card(path):
            found.setdefault(str(trees.get(recipe.tree(name), "model.family")), {})[name] = path
    return dict(sorted(found.items()))


def _comments(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return
        yield line.removeprefix("#").strip()
