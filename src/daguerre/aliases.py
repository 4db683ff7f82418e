"""Names from other trainers on the command line: looking one up, and what is said where nothing serves.

`alias_names` is the table, `alias_values` the functions from their values to ours. Recipes use our own names only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from daguerre.alias_names import ALWAYS, BELOW, CONVERTED, IDLE_BESIDE, LATER, NOTICES, REFUSED, SAME, VALUES
from daguerre.alias_values import Meaning, one
from daguerre.errors import UserError


def translate(key: str, text: str) -> Meaning:
    """Our settings for a key of the command line; a key that is in no table is returned as it is.

    UserError for a key that is refused, that is not there yet, or whose value has no counterpart.
    """
    if key in SAME:
        return one(SAME[key], text)
    if key in CONVERTED:
        return CONVERTED[key](text)
    if (instead := _row(key, REFUSED)) is not None:
        raise UserError(f"not a setting here: {instead}")
    if key in NOTICES:
        return Meaning((), (f"{key} has no counterpart on this engine: {NOTICES[key]}",))
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


def idle_beside(key: str, given: Sequence[tuple[str, str]]) -> str | None:
    """What to say of a name that has no effect beside these settings; None where it has one."""
    path, value, instead = IDLE_BESIDE.get(key, ("", "", ""))
    return f"{key} has no effect with {path}={value}: {instead}" if (path, value) in given else None
