"""Finds names of other trainers in the tables of names.yaml, and says where nothing serves.

`values.py` holds the functions from their values to ours, `relative.py` those that need other settings as well. Recipes
use our own names only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from daguerre.config.aliases import captions, controls, lora, tokens, values
from daguerre.config.aliases.names import BELOW, BESIDE, CONVERTED, LATER, NOTICES, REFUSED, SAME
from daguerre.config.aliases.relative import RELATIVE, Look
from daguerre.config.aliases.values import Meaning, one
from daguerre.errors import UserError

NAMES = tuple(name for name in (*SAME, *CONVERTED, *RELATIVE) if "." not in name)
"""Names of other trainers that a misspelt one may have meant."""
_TABLES = (values.FUNCTIONS, lora.FUNCTIONS, tokens.FUNCTIONS, captions.FUNCTIONS, controls.FUNCTIONS)
FUNCTIONS = {name: own for table in _TABLES for name, own in table.items()}
"""What a row of `converted` may name."""
IDLE = "{} is ignored: "
"""Start of the notice for a name of NOTICES."""


def translate(key: str, text: str, look: Look | None = None) -> Meaning:
    """Our settings for a key of the command line; a key that is in no table is returned as it is.

    Args:
        look: finds the settings beside, of which names of `RELATIVE` are made; without it these mean nothing.

    Raises:
        UserError: the key is refused, or not there yet, or its value has no counterpart.
    """
    if key in RELATIVE:
        return RELATIVE[key](key, text, look) if look else Meaning()
    if key in SAME:
        return one(SAME[key], text)
    if key in CONVERTED:
        name, *arguments = CONVERTED[key]
        meaning = FUNCTIONS[name](key, text, *arguments)
        return replace(meaning, notices=tuple(said if key in said else f"{key}: {said}" for said in meaning.notices))
    if (instead := _row(key, REFUSED)) is not None:
        raise UserError(f"not a Daguerre setting: {instead}", code="unknown")
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


def _row(key: str, table: Mapping[str, Any]) -> Any:
    """The row of the first pattern that a key fits; None if it fits none."""
    return next((row for pattern, row in table.items() if fnmatchcase(key, pattern)), None)


def known(key: str) -> bool:
    """True for a name of another trainer, which is in one of the tables."""
    exact = any(key in table for table in (RELATIVE, SAME, CONVERTED))
    fits = any(_row(key, table) is not None for table in (REFUSED, NOTICES, LATER))
    return exact or fits or key.startswith(tuple(BELOW))


def idle_beside(key: str, given: Sequence[tuple[str, str]]) -> str | None:
    """The notice for a name that has no effect beside these other names; None where it has one."""
    name, needed, why = BESIDE.get(key, ("", "", ""))
    for other, text in given:
        if other == name and (
            text.lower() == needed if needed else text.lower() not in ("0", "-1", "none", "null", "")
        ):
            return f"{key} has no effect with {name}={text}: {why}"
    return None
