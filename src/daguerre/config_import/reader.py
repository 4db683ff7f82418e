"""A config of another trainer while it is read: what it gives in our settings, and what is said of the rest.

Every key of theirs ends in one of three lists: carried, noticed (nothing to carry, something else serves) or refused.
What their keys mean is in convert_config_TRAINER.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from daguerre.config import overrides, recipe
from daguerre.config.aliases import lookup
from daguerre.config.aliases.relative import RELATIVE, look_in
from daguerre.config.errors import is_secret, shown
from daguerre.errors import UserError

REQUIRED = "???"
"""The value of a key that must be given on the command line."""
UNKNOWN = "no setting here has this meaning"

Kind = Literal["carried", "notice", "refused"]


@dataclass(frozen=True)
class Line:
    """What became of one key."""

    key: str
    kind: Kind
    text: str


@dataclass
class Reading:
    """What is left to read, and what was made of the rest."""

    rest: dict[str, Any]
    """Values that nothing was made of yet, by dotted path; members of lists of groups by number."""
    values: dict[str, Any] = field(default_factory=dict)
    """Our settings by dotted path."""
    lines: list[Line] = field(default_factory=list)
    assumed: dict[str, Any] = field(default_factory=dict)
    """Of our settings: what their trainer does without being asked."""
    whole: dict[str, Any] = field(default_factory=dict)
    """All values, read or not."""

    def __post_init__(self) -> None:
        self.whole = dict(self.rest)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, whether it was read already or not."""
        return self.whole.get(key, default)

    def keys(self, pattern: str) -> list[str]:
        """Keys that are still to be read, by a pattern such as `data.transforms.*`."""
        return [key for key in self.rest if fnmatchcase(key, pattern)]

    def carry(self, key: str, path: str, value: Any = None, why: str = "") -> None:
        """Their key is our setting `path`, with its own value where none is given."""
        if key not in self.rest:
            return
        theirs = self.rest[key]
        ours = theirs if value is None or theirs == REQUIRED else value
        self.carry_all(key, {path: ours}, why)

    def carry_all(self, key: str, values: Mapping[str, Any], why: str = "") -> None:
        """Their key is several of our settings."""
        if key not in self.rest:
            return
        self.values |= values
        self.assumed = {path: value for path, value in self.assumed.items() if path not in values}
        told = ", ".join(f"{path}: {shown(value)}" for path, value in values.items())
        self._say(key, "carried", told + (f" ({why})" if why else ""))

    def notice(self, key: str, text: str) -> None:
        """Their key has nothing to carry; `text` says what serves, or why nothing is needed."""
        if key in self.rest:
            self._say(key, "notice", text)

    def refuse(self, key: str, text: str = UNKNOWN) -> None:
        """Their key asks for something that is not there."""
        if key in self.rest:
            self._say(key, "refused", text)

    def expect(self, key: str, value: Any, what: str) -> None:
        """A key that has one value here: `what` says so."""
        if key in self.rest and self.rest[key] == value:
            self.notice(key, what)
        else:
            self.refuse(key, f"{what}: {shown(self.get(key))} is not there")

    def assume(self, values: Mapping[str, Any]) -> None:
        """What their trainer does without being asked, where no key of theirs said otherwise."""
        fresh = {path: value for path, value in values.items() if path not in self.values}
        self.assumed |= {path: value for path, value in fresh.items() if value != REQUIRED}
        self.values = dict(values) | self.values

    def assume_over(self, values: Mapping[str, Any]) -> None:
        """What several keys of theirs say together, in place of what was assumed; each key is read by itself."""
        self.values |= values
        self.assumed = {path: value for path, value in self.assumed.items() if path not in values}

    def alias(self, key: str, name: str = "") -> None:
        """Their key means what `name` (the key itself, if it is empty) means on the command line."""
        if key not in self.rest:
            return
        name, value = name or key, self.rest[key]
        text = value if isinstance(value, str) else shown(value, 1 << 20)
        raw = {given: other if isinstance(other, str) else shown(other, 1 << 20) for given, other in self.whole.items()}
        tree: recipe.Tree = {}
        for path, ours in self.values.items():
            tree = recipe.merge(tree, overrides.nested(path, ours))
        try:
            meaning = lookup.translate(name, text, look_in(raw, tree))
        except UserError as error:
            why = str(error).partition(f"; {name}=")[0]
            self._say(
                key,
                "notice" if value == REQUIRED else "refused",
                f"no value is needed: {why}" if value == REQUIRED else why,
            )
            return
        if meaning.values:
            given = {path: value if found == text else found for path, found in meaning.values}
            self.carry_all(key, given, "; ".join(meaning.notices))
        else:
            said = "; ".join(meaning.notices).removeprefix(lookup.IDLE.format(name))
            self._say(key, "notice", said or "what happens anyway")

    def aliases(self) -> None:
        """All that is left of names that mean something on the command line; those that ask for others come last."""
        names = [key for key in self.rest if lookup.known(key)]
        for key in sorted(names, key=lambda name: name in RELATIVE):
            self.alias(key)

    def finish(self) -> None:
        """Refuses what nothing was made of."""
        for key in list(self.rest):
            self.refuse(key)

    def _say(self, key: str, kind: Kind, text: str) -> None:
        del self.rest[key]
        self.lines.append(Line(key, kind, "secrets stay in the environment" if is_secret(key) else text))


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted path; a list of groups is walked by number, other lists are values."""
    groups = isinstance(tree, list) and bool(tree) and all(isinstance(item, dict) for item in tree)
    inner = dict(enumerate(tree)) if groups else tree
    if isinstance(inner, dict) and inner:
        for name, value in inner.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    elif prefix:
        yield prefix, tree


def last(target: Any) -> str:
    """The class that a dotted target names."""
    return str(target).rpartition(".")[2]
