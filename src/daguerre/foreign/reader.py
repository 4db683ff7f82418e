"""A config of another trainer while it is read: what it gives in our settings, and the messages on the rest.

Every key of theirs ends in one of three lists: carried, noticed (nothing to carry, something else serves) or refused.
What their keys mean is in the tables TRAINER.yaml, which `Reading.take` reads, and in the module of the trainer where
several keys mean something together. A row of a table is `key: meaning`, where several keys (or patterns) are separated
by ", ", and a meaning is a setting of ours, or a mapping of these (or a list of such, the first that fits):

    if: values that the row is for; class: classes of a dotted target that the row is for
    to: our setting; values: theirs to ours, and for other values the row is not; value: ours, whatever theirs is
    sets: several settings of ours and their values
    within: the setting of sources that this key has gone into, with others
    notice: why nothing is carried; refused: what is not supported here
    only: the one value that is accepted, with `notice`, which also refuses others
    alias: the name on the command line that has this meaning
    why: a remark on what is carried
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import yaml

from daguerre import trees
from daguerre.credentials import is_secret
from daguerre.errors import UserError
from daguerre.foreign.names import lookup
from daguerre.foreign.names.relative import look_in
from daguerre.formatting import shown

FOLDER = Path(__file__).parent / "trainers"
REQUIRED = "???"
"""The value of a key that must be given on the command line."""
UNKNOWN = "there is no such setting here"

Kind = Literal["carried", "notice", "refused"]


@dataclass(frozen=True)
class Line:
    """The outcome for one key."""

    key: str
    kind: Kind
    text: str


@dataclass
class Reading:
    """The keys that are left to read, and what was made of the rest."""

    rest: dict[str, Any]
    """Values that nothing was made of yet, by dotted path; members of lists of groups by number."""
    values: dict[str, Any] = field(default_factory=dict)
    """Our settings by dotted path."""
    lines: list[Line] = field(default_factory=list)
    assumed: dict[str, Any] = field(default_factory=dict)
    """Of our settings: what their trainer does without being asked."""
    whole: dict[str, Any] = field(default_factory=dict)
    """All values, read or not."""
    by: dict[tuple[str, str], tuple[str, Any]] = field(default_factory=dict)
    """The first of several keys in a list, and its value, by their name and our setting."""

    def __post_init__(self) -> None:
        self.whole = dict(self.rest)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, whether it was read already or not."""
        return self.whole.get(key, default)

    def keys(self, pattern: str) -> list[str]:
        """Keys that are still to be read, by a pattern such as `data.transforms.*`."""
        return [key for key in self.rest if fnmatchcase(key, pattern)]

    def numbered(self, key: str) -> list[str]:
        """The members of a list of groups that are still to be read, such as `concepts.0`, in their order."""
        depth = key.count(".") + 1
        numbers = sorted({int(name.split(".")[depth]) for name in self.keys(f"{key}.*.*")})
        return [f"{key}.{number}" for number in numbers]

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
        for path, value in values.items():
            first, other = self.by.setdefault((generic(key), path), (key, value))
            if other != value:
                self.refuse(key, f"{path} is one for all, and {first} makes it {shown(other)}")
                return
        self.values |= values
        self.assumed = {path: value for path, value in self.assumed.items() if path not in values}
        told = ", ".join(f"{path}: {shown(value)}" for path, value in values.items())
        self._say(key, "carried", told + (f" ({why})" if why else ""))

    def within(self, key: str, text: str) -> None:
        """Their key has gone, with others, into the settings of sources: `text` is `path of its source`."""
        if key in self.rest:
            end = f".{text.partition(' of its source')[0]}"
            self.assumed = {p: v for p, v in self.assumed.items() if not (p.startswith("data.") and p.endswith(end))}
            self._say(key, "carried", text)

    def notice(self, key: str, text: str) -> None:
        """Their key has nothing to carry; `text` says what serves, or why nothing is needed."""
        if key in self.rest:
            self._say(key, "notice", text)

    def note(self, patterns: Iterable[str], text: str) -> None:
        """`notice` for all keys that fit one of some patterns."""
        for key in [key for pattern in patterns for key in self.keys(pattern)]:
            self.notice(key, text)

    def refuse(self, key: str, text: str = UNKNOWN) -> None:
        """Their key asks for something that is not supported here."""
        if key in self.rest:
            self._say(key, "refused", text)

    def echo(self, key: str, line: Line) -> None:
        """The outcome of another key, in which this one was read."""
        if key in self.rest:
            self._say(key, line.kind, line.text)

    def take(self, table: Mapping[str, Any], prefix: str = "") -> None:
        """Reads the keys that a table names, below a prefix."""
        for names, meanings in table.items():
            rows = meanings if isinstance(meanings, list) else [meanings]
            for name in names.split(", "):
                for key in self.keys(prefix + name) if "*" in name else [prefix + name]:
                    for row in rows:
                        self._row(key, {"to": row} if isinstance(row, str) else row)

    def _row(self, key: str, row: Mapping[str, Any]) -> None:
        theirs, why = self.get(key), row.get("why", "")
        fits = theirs in row.get("if", [theirs]) and last(theirs) in row.get("class", [last(theirs)])
        if key not in self.rest or not fits:
            return
        if "values" in row:
            if isinstance(theirs, str | bool) and theirs in row["values"]:
                self.carry(key, row["to"], row["values"][theirs], why)
        elif "to" in row:
            self.carry(key, row["to"], row.get("value"), why)
        elif "sets" in row:
            self.carry_all(key, row["sets"], why)
        elif "only" in row:
            self.expect(key, row["only"], row["notice"])
        elif "alias" in row:
            self.alias(key, row["alias"])
        elif "within" in row:
            self.within(key, row["within"])
        elif "notice" in row:
            self.notice(key, row["notice"])
        else:
            self.refuse(key, row["refused"])

    def expect(self, key: str, value: Any, what: str) -> None:
        """A key that has one value here: `what` says so."""
        if key in self.rest and self.rest[key] == value:
            self.notice(key, what)
        else:
            self.refuse(key, f"{what}: {shown(self.get(key))} is not supported here")

    def assume(self, values: Mapping[str, Any], *without: str) -> None:
        """Adds what their trainer does without being asked, where no key of theirs said otherwise."""
        fresh = {path: value for path, value in values.items() if path not in {*self.values, *without}}
        self.assumed |= {path: value for path, value in fresh.items() if value != REQUIRED}
        self.values = fresh | self.values

    def assume_over(self, values: Mapping[str, Any]) -> None:
        """Sets what several keys of theirs say together, in place of what was assumed; each key is read by itself."""
        self.values |= values
        self.assumed = {path: value for path, value in self.assumed.items() if path not in values}

    def alias(self, key: str, name: str = "", value: Any = None) -> None:
        """Their key, with its own value where none is given, means what `name` (the key itself, if it is empty) means
        on the command line."""
        if key not in self.rest:
            return
        name, value = name or key, self.rest[key] if value is None else value
        text = value if isinstance(value, str) else shown(value, 1 << 20)
        raw = {given: other if isinstance(other, str) else shown(other, 1 << 20) for given, other in self.whole.items()}
        tree: trees.Tree = {}
        for path, ours in self.values.items():
            tree = trees.merge(tree, trees.nested(path, ours))
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
        for key in sorted(names, key=lambda name: name in lookup.RELATIVE):
            self.alias(key)

    def finish(self) -> None:
        """Refuses what nothing was made of."""
        for key in list(self.rest):
            self.refuse(key)

    def _say(self, key: str, kind: Kind, text: str) -> None:
        del self.rest[key]
        self.lines.append(Line(key, kind, "secrets stay in the environment" if is_secret(key) else text))


class Tables(dict[str, Any]):
    """The tables of a trainer, from the file of the folder `trainers`, read when the first of them is asked for."""

    def __init__(self, trainer: str) -> None:
        self.path = FOLDER / f"{trainer}.yaml"

    def __missing__(self, name: str) -> Any:
        self.update(yaml.load(self.path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
        return self.get(name, {})


def references() -> frozenset[str]:
    """Values in the tables of all trainers that refer to other settings of the recipe: `${adapters...}`."""
    texts = [path.read_text(encoding="utf-8") for path in FOLDER.glob("*.yaml")]
    return frozenset(found for text in texts for found in re.findall(r'"(\$\{[\w.]+\})"', text))


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted path; a list of groups is walked by number, other lists are values."""
    groups = isinstance(tree, list) and bool(tree) and all(isinstance(item, dict) for item in tree)
    inner = dict(enumerate(tree)) if groups else tree
    if isinstance(inner, dict) and inner:
        for name, value in inner.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    elif prefix:
        yield prefix, tree


def generic(key: str) -> str:
    """A key with `*` in the place of its numbers in lists: `concepts.0.path` is `concepts.*.path`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", key)


def last(target: Any) -> str:
    """The class that a dotted target names."""
    return str(target).rpartition(".")[2]
