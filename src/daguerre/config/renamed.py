"""Settings that were renamed or removed (CONTRIBUTING.md, "Releases and renamed settings").

The MINOR version of a row still reads the old key, as the new one, with a notice. Later ones refuse it, and name the
new key: rows stay.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from daguerre import __version__, trees
from daguerre.config.errors import Problem
from daguerre.trees import Tree

_SHORT = {"adapters.*.": "adapter.", "data.sources.*.": "data."}
"""Beginnings of paths, and their short forms on a command line."""


@dataclass(frozen=True)
class Renamed:
    """A key that has another name now."""

    old: str
    """Its path, with * for names that recipes give: adapters.*.ranks."""
    new: str
    """Its path now, with * in the same places; empty for one that was removed."""
    since: tuple[int, int]
    """The MINOR version that reads both."""
    instead: str = ""
    """What to do in place of one that was removed."""

    def of(self, key: str) -> str | None:
        """The new key in the form of an old one: its path, its short form, or its name alone; "" where it was removed,
        None where `key` is another setting."""
        forms = [(self.old, self.new), (self.old.rpartition(".")[2], self.new.rpartition(".")[2])]
        forms += [(self.old.replace(long, short), self.new.replace(long, short)) for long, short in _SHORT.items()]
        for old, new in forms:
            if key.count(".") == old.count(".") and fnmatchcase(key, old):
                both = zip(old.split("."), key.split("."), strict=True)
                names = iter([name for pattern, name in both if pattern == "*"])
                return ".".join(next(names) if part == "*" else part for part in new.split("."))
        return None

    def today(self, key: str, new: str, value: Any, notices: list[str], problems: list[Problem]) -> str:
        """The key that is read in place of an old one; "" with a problem."""
        since = ".".join(map(str, self.since))
        if not new:
            problems.append(Problem(key, f"this setting is gone since version {since}: {self.instead}", value))
        elif tuple(map(int, __version__.split(".")[:2])) > self.since:
            problems.append(Problem(key, f"this setting is called {new} since version {since}: write {new}", value))
            return ""
        else:
            notices.append(f"{key} is called {new} now: it is read in this version, and refused by the next one")
        return new


RENAMED: tuple[Renamed, ...] = ()
"""All of them, the oldest first."""


def given(words: Sequence[str], notices: list[str], problems: list[Problem]) -> list[str]:
    """The `key=value` of a command line under their keys of today."""
    found = []
    for word in words:
        key, sign, value = word.partition("=")
        row, new = next(((row, new) for row in RENAMED if (new := row.of(key)) is not None), (None, key))
        new = row.today(key, new, value, notices, problems) if row else key
        found += [f"{new}{sign}{value}"] if new else []
    return found


def layer(tree: Tree, notices: list[str], problems: list[Problem]) -> Tree:
    """The settings of a file under their keys of today."""
    for row in RENAMED:
        for key in [*dict.fromkeys(part for path, _ in trees.paths(tree) for part in _beginnings(path))]:
            if (new := row.of(key)) is not None:
                value = trees.get(tree, key)
                new = row.today(key, new, value, notices, problems)
                # Where both stand, the new one counts.
                tree = trees.merge(trees.nested(new, value) if new else {}, trees.without(tree, key))
    return tree


def _beginnings(path: str) -> Iterator[str]:
    parts = path.split(".")
    yield from (".".join(parts[: i + 1]) for i in range(len(parts)))
