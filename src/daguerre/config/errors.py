"""Problems of a recipe or command, gathered and shown together; nothing here finds any but pydantic's.

One problem is a path, what was given there and what is wrong with it; `ConfigError` shows all of them at once.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_origin

from pydantic_core import ErrorDetails

from daguerre import credentials
from daguerre.config import fields
from daguerre.config.fields import Leaf, allowed, summary
from daguerre.errors import UserError
from daguerre.foreign.names import lookup
from daguerre.formatting import shown
from daguerre.settings import WithoutEffect

_KINDS = ("type", "kind", "class")
"""What the name of a plug-in is called elsewhere."""
NOTHING = object()
"""Stands for "nothing was given" in a problem."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    path: str
    """Where: a dotted path, or the override as it was written."""
    text: str
    """What is wrong, what is allowed, what to do."""
    given: Any = NOTHING
    """The value that was given, shown as YAML would write it."""


class ConfigError(UserError):
    """A recipe or its overrides cannot be used; the message lists every problem that was found."""

    def __init__(self, problems: Sequence[Problem], source: str) -> None:
        """`source` says what was read, such as a recipe's file name."""
        self.problems = tuple(problems)
        count = len(self.problems)
        head = f"{source}: {count} problem{'s' if count > 1 else ''}"
        super().__init__("\n\n".join([head, *(_block(p) for p in self.problems)]))
        self.setting = self.problems[0].path if count == 1 else None


def _block(problem: Problem) -> str:
    hidden = credentials.is_secret(problem.path)
    given = "" if problem.given is NOTHING else " = (not shown)" if hidden else f" = {shown(problem.given)}"
    lines = "\n".join(f"      {line}" for line in problem.text.splitlines())
    return f"  {problem.path}{given}\n{lines}"


def unknown(path: str, given: Any, leaves: Mapping[str, Leaf], sections: Sequence[str]) -> Problem:
    """A key that does not exist, with the nearest that does, or all that stand where it was looked for."""
    if credentials.is_secret(path, given):
        text = "never put secrets into a recipe or on the command line: set the service's environment variable"
        return Problem(path, text)
    meant = path.partition(" (")[2].removesuffix(")") or path  # another trainer's name has ours behind it
    section, _, name = meant.rpartition(".")
    elsewhere = _other_plugins(section, name, leaves)
    if elsewhere:
        return Problem(path, elsewhere, given)
    if instead := lookup.refused(name):  # training.epochs: the name alone is another trainer's
        return Problem(path, instead, given)
    if not section and meant not in lookup.SAME and (ours := _of_another(meant, given)):
        return Problem(path, ours, given)
    theirs = name in lookup.NAMES and not any(known.rpartition(".")[2] == name for known in leaves)
    found = [lookup.SAME.get(name, name)] if theirs else []  # optimizer.lr, likewise
    near = found or nearest(meant, [*leaves, *sections]) or nearest(meant, lookup.NAMES)
    siblings = [known.rpartition(".")[2] for known in [*leaves, *sections] if known.rpartition(".")[0] == section]
    if near:
        hint = f" Did you mean {' or '.join(near)}?"
    else:
        hint = f" {section or 'A recipe'} has {', '.join(siblings)}." if siblings else ""
    return Problem(path, f"there is no such setting.{hint}", given)


def _of_another(name: str, given: Any) -> str:
    """Says what to write for a name of another trainer that stands in a recipe; empty for other names."""
    if not lookup.known(name):
        return ""
    text = str(given).lower() if isinstance(given, bool) else str(given)
    try:
        values = lookup.translate(name, text, lookup.look_in({name: text}, {})).values
    except UserError as error:
        return str(error)
    ours = " and ".join(f"{path}: {value}" for path, value in values)
    here = f"in a recipe write {ours}" if ours else "docs/coming-from.md says what it sets"
    return f"a name of another trainer, which the command line alone reads ({name}={text}): {here}"


def _other_plugins(section: str, name: str, leaves: Mapping[str, Leaf]) -> str:
    """Says so where a key (of a section, or without one) belongs to other plug-ins than those that were chosen."""
    owners, section = [], "" if section == "adapter" else section
    for path, leaf in leaves.items():
        plugged = path.rpartition(".")[0]
        field = section[len(plugged) + 1 :].partition(".")[0] or name
        inside = section in ("", plugged) or section.startswith(f"{plugged}.")
        if leaf.plugin and inside and not any(known.startswith(f"{plugged}.{field}.") for known in leaves):
            able = [n for n in leaf.plugin.able() if field in leaf.plugin.settings_class(n).model_fields]
            owners += [f"{path}={' or '.join(able)}"] if able else []
    mark = fields.plugin_inside(leaves["adapters"].field) if "adapters" in leaves and not (owners or section) else None
    if mark and (able := [n for n in mark.able() if name in mark.settings_class(n).model_fields]):
        owners = [f"adapter.{mark.key}={' or '.join(able)}"]
    return f"this setting exists only with {' or '.join(owners)}" if owners else ""


def nearest(path: str, known: Sequence[str]) -> list[str]:
    """The known paths that `path` was probably meant to be, best first, at most two.

    A word in front makes another name, and is no slip of the pen: `eval_batch_size` is not `sampling.batch_size`.
    """
    last = path.rpartition(".")[2]
    same = [k for k in known if k.rpartition(".")[2] == last and k != path]
    prefix = path.rpartition(".")[0]
    inside = [k for k in same if prefix and k.startswith(f"{prefix}.")]
    if inside or 0 < len(same) <= 2:
        return (inside or same)[:2]
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == prefix}
    if last in _KINDS and "name" in siblings and prefix:
        return [siblings["name"]]
    by_name = difflib.get_close_matches(last, list(siblings), n=1, cutoff=0.65 if prefix else 0.7)
    if by_name and (prefix or _slip(last, by_name[0])):
        return [siblings[by_name[0]]]
    ends = {name: k for k in known if _slip(last, name := k.rpartition(".")[2]) and k not in same}
    if prefix and siblings:  # in a section that there is, cache.dtype is not meant by optimizer.type
        return [ends[each] for each in difflib.get_close_matches(last, list(ends), n=1, cutoff=0.9)]
    by_end = difflib.get_close_matches(last, list(ends), n=1, cutoff=0.75)
    whole = [k for k in known if _slip(last, k.rpartition(".")[2])] if "." not in path else list(known)
    return [ends[by_end[0]]] if by_end else difflib.get_close_matches(path, whole, n=1, cutoff=0.75)


def _slip(given: str, known: str) -> bool:
    """True if a name may be a known one misspelt: word by word, with a word more at the end, or with other `_`."""
    words, others = given.split("_"), known.split("_")
    if len(words) == len(others) or len(words) == len(others) + 1 > 2:
        return all(difflib.SequenceMatcher(None, *pair).ratio() >= 0.6 for pair in zip(words, others, strict=False))
    plain, other = given.replace("_", ""), known.replace("_", "")
    return difflib.SequenceMatcher(None, plain, other).ratio() >= 0.9


def group(path: str, given: Any, leaves: Mapping[str, Leaf], section: str) -> Problem:
    """A value for a whole section."""
    inner = [known for known in leaves if known.startswith(f"{section}.")]
    switches = {f"{section}.enabled": ("false", "true or false"), f"{section}.every": ("null", "null")}
    ways = ((known, *switch) for known, switch in switches.items() if known in leaves)
    off = next((f"{known}={text}" for known, text, end in ways if allowed(leaves[known]).endswith(end)), "")
    if off and given in (None, False, "null", "false", "none", "off"):
        return Problem(path, f"is a group of settings: {off} switches it off", given)
    return Problem(path, f"is a group of settings: set one of them, such as {inner[0]}", given)


def missing(path: str, leaves: Mapping[str, Leaf]) -> Problem:
    """A setting that must be given and was not."""
    leaf = leaves.get(path)
    about = f": {summary(leaf.doc)}" if leaf and leaf.doc else ""
    return Problem(path, f"must be given{about}\nAllowed: {allowed(leaf)}" if leaf else "must be given")


def translate(error: ErrorDetails, prefix: str, leaves: Mapping[str, Leaf], sections: Sequence[str]) -> list[Problem]:
    """The problems behind one of pydantic's errors; errors of a plug-in's section come nested in their context."""
    context = error.get("ctx") or {}
    path = ".".join([*([prefix] if prefix else []), *_names(error["loc"], leaves, prefix)])
    if "errors" in context:
        return [p for inner in context["errors"] for p in translate(inner, path, leaves, sections)]
    if "problems" in context:
        return list(context["problems"])
    kind, given = error["type"], error["input"]
    if isinstance(unused := context.get("error"), WithoutEffect):
        values = given if isinstance(given, Mapping) else {}
        ways = unused.fields.items()
        return [Problem(f"{path}.{name}".lstrip("."), text, values.get(name, NOTHING)) for name, text in ways]
    if kind == "missing":
        within = [known for known, leaf in leaves.items() if known.startswith(f"{path}.") and leaf.required]
        return [missing(known, leaves) for known in within or [path]]
    if kind == "extra_forbidden":
        return [unknown(path, given, leaves, sections)]
    text = str(context["error"]) if kind in ("value_error", "assertion_error") else error["msg"]
    if kind in ("value_error", "plugin"):
        return [Problem(path or "(whole recipe)", text, given if isinstance(given, (str, int, float)) else NOTHING)]
    above, _, name = path.rpartition(".")
    leaf = leaves.get(path) or (fields.member(leaves[above], name) if above in leaves else None)
    if path in sections:
        return [group(path, given, leaves, path)]
    if kind == "too_short" and not given:
        return [Problem(path, "is empty: there must be one at least")]
    empty = "is empty; " if kind == "string_too_short" and given == "" else ""
    words = allowed(leaf) if leaf else ""
    if isinstance(given, str) and words.startswith("a list [..., ...] of text"):
        words += f", such as {name}='{shown([given])}'"
    if isinstance(given, str) and words.endswith("{key: a number}"):
        words += f", such as {name}='{{{given}: 1}}'"
    return [Problem(path, f"{empty}allowed: {words}" if leaf else text[:1].lower() + text[1:], given)]


def _names(loc: tuple[int | str, ...], leaves: Mapping[str, Leaf], prefix: str) -> list[str]:
    """The path of a location, without what pydantic adds for members of unions below a leaf."""
    names: list[str] = []
    for part in loc:
        names.append(str(part))
        leaf = leaves.get(".".join([*([prefix] if prefix else []), *names]))
        if leaf is not None:
            inside = loc[len(names) : len(names) + 1] if get_origin(leaf.field.annotation) is dict else ()
            return [*names, *map(str, inside)]
    return names
