"""Finds names of other trainers in the tables of names.yaml, and says where nothing serves.

`values.py` holds the functions from their values to ours, `relative.py` those that need other settings as well. Recipes
use our own names only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from inspect import isfunction, signature
from typing import Any

from daguerre.errors import UserError
from daguerre.foreign.names import captions, controls, lora, relative, tokens, values
from daguerre.foreign.names.relative import Look, look_in
from daguerre.foreign.names.tables import BELOW, BESIDE, CONVERTED, LATER, NOTICES, REFUSED, SAME
from daguerre.foreign.names.values import Meaning, one
from daguerre.trees import Tree

_MODULES = (captions, controls, lora, relative, tokens, values)
FUNCTIONS = {
    name: function
    for module in _MODULES
    for name, function in vars(module).items()
    if isfunction(function) and function.__module__ == module.__name__
}
"""What a row of `converted` may name."""
RELATIVE = frozenset(name for name, row in CONVERTED.items() if "look" in signature(FUNCTIONS[row[0]]).parameters)
"""Names that mean something only together with other settings."""
NAMES = tuple(name for name in (*SAME, *CONVERTED) if "." not in name)
"""Names of other trainers that a misspelt one may have meant."""
Pair = tuple[str, str, str]
"""The name of the command line, with our setting behind it where that has another; our setting; its text."""
Refuse = Callable[..., None]
"""Gets a name, why it is refused, and its text if that is the reason."""
IDLE = "{} is ignored: "
"""Start of the notice for a name of NOTICES."""


def translate(key: str, text: str, look: Look | None = None) -> Meaning:
    """Our settings for a key of the command line; a key that is in no table is returned as it is.

    Args:
        look: finds the other settings, of which names of `RELATIVE` are made; without it these mean nothing.

    Raises:
        UserError: the key is refused, or not there yet, or its value has no counterpart.
    """
    if key in SAME:
        return one(SAME[key], text)
    if key in CONVERTED:
        name, *arguments = CONVERTED[key]
        if key in RELATIVE and look is None:
            return Meaning()
        meaning = FUNCTIONS[name](key, text, *([look] if key in RELATIVE else []), *arguments)
        return replace(meaning, notices=tuple(said if key in said else f"{key}: {said}" for said in meaning.notices))
    if instead := refused(key):
        raise UserError(instead, code="unknown")
    if (serves := _row(key, NOTICES)) is not None:
        return Meaning((), (IDLE.format(key) + serves,))
    for theirs, ours in BELOW.items():
        if key.startswith(theirs):
            return one(ours + key.removeprefix(theirs), text)
    part, off = _row(key, LATER) or ("", ())
    return values.absent(key, text, part, *off) if part else one(key, text)


def value(path: str, text: str) -> str:
    """The text that is given to a setting of ours, by our own name of the value."""
    return values.sampler(text) if path == "sampling.sampler" else text


def refused(key: str) -> str:
    """Says what serves in place of a name that means nothing, or several things, here; "" for another name."""
    instead = _row(key, REFUSED)
    return "" if instead is None else f"not a Daguerre setting: {instead}"


def _row(key: str, table: Mapping[str, Any]) -> Any:
    """The row of a key, or of the first pattern that it fits; None if it fits none."""
    if key in table:
        return table[key]
    # Hardly a row is a pattern, and every override is looked up in three tables.
    return next((row for pattern, row in table.items() if "*" in pattern and fnmatchcase(key, pattern)), None)


def known(key: str) -> bool:
    """True for a name of another trainer, which is in one of the tables."""
    exact = key in SAME or key in CONVERTED
    fits = any(_row(key, table) is not None for table in (REFUSED, NOTICES, LATER))
    return exact or fits or key.startswith(tuple(BELOW))


def pairs(given: Sequence[tuple[str, str]], notices: list[str], refuse: Refuse) -> list[Pair]:
    """The settings of a command line by our names, with those that follow from other trainers' names; not yet those
    that depend on other settings (`relative_pairs`)."""
    meanings = [(key, _read(key, text, None, notices, refuse)) for key, text in given]
    found = [pair for key, meaning in meanings for pair in _labelled(key, meaning)]
    set_by_name = {path for _, path, _ in found}
    for key, path, find in ((key, *implied) for key, meaning in meanings for implied in meaning.implied):
        if path in set_by_name or path.rpartition(".")[2] in set_by_name:  # as a whole path, or by the last name alone
            continue
        try:
            text = find()
        except UserError as error:
            refuse(key, str(error))
            break
        if text is not None:
            found.append((f"{key} ({path})", path, text))
    beside = [*((path, value) for _, path, value in found), *dict(given).items()]
    idle = {pair: said for pair in found if (said := _idle_beside(pair[0].partition(" ")[0], beside))}
    notices += idle.values()
    return [pair for pair in found if pair not in idle]


def relative_pairs(given: Sequence[tuple[str, str]], tree: Tree, notices: list[str], refuse: Refuse) -> list[Pair]:
    """Settings by names that mean something only together with other settings: those of the command line, and of
    `tree`."""
    raw = dict(given)
    look = look_in(raw, tree)
    names = [key for key in raw if key in RELATIVE]
    return [pair for key in names for pair in _labelled(key, _read(key, raw[key], look, notices, refuse))]


def _read(key: str, text: str, look: Look | None, notices: list[str], refuse: Refuse) -> Meaning:
    try:
        meaning = translate(key, text, look)
    except UserError as error:
        refuse(key, str(error), text)
        return Meaning()
    notices += meaning.notices
    return meaning


def _labelled(key: str, meaning: Meaning) -> list[Pair]:
    return [(key if key == path else f"{key} ({path})", path, value) for path, value in meaning.values]


def _idle_beside(key: str, given: Sequence[tuple[str, str]]) -> str | None:
    """The notice for a name that has no effect with these other names; None where it has one."""
    name, needed, why = BESIDE.get(key, ("", "", ""))
    for other, text in given:
        if other == name and (
            text.lower() == needed if needed else text.lower() not in ("0", "-1", "none", "null", "")
        ):
            return f"{key} has no effect with {name}={text}: {why}"
    return None
