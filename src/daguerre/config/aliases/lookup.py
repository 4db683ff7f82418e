"""Names from other trainers on the command line: looking one up, and what is said where nothing serves.

`alias_names` and `alias_peers` are the tables, `alias_later` that of names whose part is not there, `alias_values` and
`alias_peers_values` the functions from their values to ours. Recipes use our own names only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from daguerre.config.aliases import later as aliases_later
from daguerre.config.aliases import names, peers
from daguerre.config.aliases.names import ALWAYS, BELOW, NOTICES, REFUSED, VALUES
from daguerre.config.aliases.relative import RELATIVE, Look
from daguerre.config.aliases.values import Meaning, one
from daguerre.errors import UserError

SAME = names.SAME | peers.SAME
CONVERTED = names.CONVERTED | peers.CONVERTED
LATER = names.LATER | aliases_later.ROWS
NAMES = tuple(name for name in (*SAME, *CONVERTED, *RELATIVE) if "." not in name)
"""Names of other trainers that a misspelt one may have meant."""


def translate(key: str, text: str, look: Look | None = None) -> Meaning:
    """Our settings for a key of the command line; a key that is in no table is returned as it is. `look` finds the
    settings beside, of which names of `RELATIVE` are made; without it these mean nothing.

    UserError for a key that is refused, that is not there yet, or whose value has no counterpart.
    """
    if key in RELATIVE:
        return RELATIVE[key](key, text, look) if look else Meaning()
    if key in SAME:
        return one(SAME[key], text)
    if key in CONVERTED:
        meaning = CONVERTED[key](text)
        return replace(meaning, notices=tuple(said if key in said else f"{key}: {said}" for said in meaning.notices))
    if (instead := _row(key, REFUSED)) is not None:
        raise UserError(f"not a setting here: {instead}")
    if (serves := _row(key, NOTICES)) is not None:
        return Meaning((), (f"{key} has no counterpart on this engine: {serves}",))
    if key in ALWAYS:
        return _always(key, text)
    for theirs, ours in BELOW.items():
        if key.startswith(theirs):
            return one(ours + key.removeprefix(theirs), text)
    later = _row(key, LATER)
    return one(key, text) if later is None else _later(key, text, *later)


def value(path: str, text: str) -> str:
    """The text that is given to a setting of ours, by our own name of the value."""
    return VALUES[path](text) if path in VALUES else text


def _row(key: str, table: Mapping[str, Any]) -> Any:
    """The row of the first pattern that a key fits; None if it fits none."""
    return next((row for pattern, row in table.items() if fnmatchcase(key, pattern)), None)


def _always(key: str, text: str) -> Meaning:
    value, what = ALWAYS[key]
    if text.lower() == value:
        return Meaning((), (f"{key}={text} is what happens anyway: {what}",))
    raise UserError(f"{what}, always: {key}={value} is accepted")


def _later(key: str, text: str, what: str, idle: Sequence[str]) -> Meaning:
    if text.lower() in idle:
        return Meaning((), (f"{key}={text} is what happens anyway: {what} is not there yet",))
    raise UserError(f"{what} is not there yet" + (f"; {key}={idle[0]} is accepted" if idle else ""))


def known(key: str) -> bool:
    """Whether a key is in one of the tables: a name of another trainer."""
    exact = any(key in table for table in (RELATIVE, SAME, CONVERTED, ALWAYS))
    fits = any(_row(key, table) is not None for table in (REFUSED, NOTICES, LATER))
    return exact or fits or key.startswith(tuple(BELOW))


def idle_beside(key: str, given: Sequence[tuple[str, str]]) -> str | None:
    """The notice for a name that has no effect beside these other names; None where it has one."""
    name, needed, why = peers.BESIDE.get(key, ("", None, ""))
    beside = next((text for other, text in given if other == name and _asks(text, needed)), None)
    return None if beside is None else f"{key} has no effect with {name}={beside}: {why}"


def _asks(text: str, needed: str | None) -> bool:
    return text == needed if needed is not None else text.lower() not in ("0", "-1", "none", "null", "")
