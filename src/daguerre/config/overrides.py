"""`key=value` on the command line: splitting the arguments, finding the setting that a name means, typing its text.

The names that other trainers use are a table in `aliases`; recipes are files in `recipe`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import RootModel

from daguerre import yaml_text
from daguerre.config.fields import Leaf, alternatives
from daguerre.errors import UserError
from daguerre.foreign.names.tables import FLAGS, PAIRS, WORDS
from daguerre.settings import Duration

Pair = tuple[str, str, Any]
"""An override: the name that a problem gives it, the setting that it means, and its text (or its value)."""

_SETTING = re.compile(r"[A-Za-z_][\w.-]*=")


@dataclass(frozen=True)
class Arguments:
    """The arguments of a verb."""

    recipe: str
    """The bare word, or what `config` names; empty if there is neither (`recipe.locate` then asks for one)."""
    overrides: tuple[str, ...]
    """All `key=value`, in their order, without leading dashes."""
    flags: frozenset[str]
    """The switches that were given, of those that the verb knows."""


def split(arguments: Sequence[str], flags: Sequence[str] = (), short: Mapping[str, str] | None = None) -> Arguments:
    """Sort a verb's arguments into recipe, overrides and flags; `short` are other words for some options (`-o`).

    Overrides are `key=value`, `--key=value` or `--key value`, and `--key` alone for the switches of other trainers;
    `config=PATH` names the recipe. UserError for a second recipe and for a key without a value.
    """
    recipes: list[str] = []
    overrides: list[str] = []
    found: set[str] = set()
    rest = [(short or {}).get(word, word) for word in arguments]
    while rest:
        word = rest.pop(0)
        if word in flags:
            found.add(word)
        elif word.startswith("--") and "=" not in word:
            overrides.append(f"{word[2:]}={_value(word, rest, flags)}")
        elif "=" in word and "://" not in word.partition("=")[0]:
            overrides.append(word.removeprefix("--"))
        elif word.startswith("-"):
            raise UserError(
                f"there is no option {word}: settings are written key=value{_flags_hint(flags)}", code="unknown"
            )
        else:
            recipes.append(word)
    recipes += [o.partition("=")[2] for o in overrides if o.startswith("config=")]
    if len(recipes) > 1:
        raise UserError(
            f"one recipe at a time, got {' and '.join(recipes)}: settings are written key=value, without spaces; "
            'quote a value that has some, as in prompt="a red circle"',
            code="conflict",
        )
    kept = tuple(o for o in overrides if not o.startswith("config="))
    return Arguments(recipes[0] if recipes else "", kept, frozenset(found))


def _value(word: str, rest: list[str], flags: Sequence[str]) -> str:
    """The value of `--key`, taken from the words that follow."""
    name = word[2:].replace("-", "_")
    if name in FLAGS and not (rest and rest[0].lower() in ("true", "false")):
        return "true"
    if not rest or rest[0] in flags or rest[0].startswith("--"):
        if name == "dry_run":
            raise UserError(f"there is no {word} here: `daguerre train RECIPE --dry-run` shows what a run would do")
        raise UserError(f"{word} needs a value: write {word[2:]}=VALUE{_flags_hint(flags)}", code="missing")
    if name not in WORDS | PAIRS:
        return rest.pop(0)
    values = []
    while rest and not rest[0].startswith("--") and (name in PAIRS or not _SETTING.match(rest[0])):
        values.append(rest.pop(0))
    return values[0] if values and values[0].startswith("[") else json.dumps(values, ensure_ascii=False)


def _flags_hint(flags: Sequence[str]) -> str:
    return f" (options without a value: {', '.join(flags)})" if flags else ""


def pair(override: str) -> tuple[str, str]:
    """(key, text) of one override; dashes in the key are read as underscores. UserError without `=`."""
    key, equals, text = override.removeprefix("--").partition("=")
    if not equals or not key.strip():
        raise UserError(f"{override!r} is not a setting: write key=value")
    return key.strip().replace("-", "_"), text


def find(key: str, leaves: Mapping[str, Leaf], sections: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """The setting that a key means, and the keys inside it (for settings that are mappings); None for no setting.

    A key is a whole path, or a name that only one setting has. UserError lists the paths of a name that several have.
    """
    if key in leaves:
        return key, ()
    if key in sections:
        return key, ()
    for path, leaf in leaves.items():
        member, *_ = inside = key[len(path) + 1 :].split(".")
        mapping = key.startswith(f"{path}.") and any(_is_mapping(a) for a in alternatives(leaf.field.annotation))
        if mapping and f"{path}.{member}" not in sections:
            return path, tuple(inside)
    same = [path for path in leaves if path.endswith(f".{key}")]
    if len(same) > 1:
        raise UserError(f"{key} could mean {len(same)} settings: write {', '.join(same[:-1])} or {same[-1]}")
    return (same[0], ()) if same else None


def _is_mapping(annotation: Any) -> bool:
    return annotation is dict or get_origin(annotation) is dict or _is_root(annotation)


def _is_root(annotation: Any) -> bool:
    """True of what is a text, or the same in lists and mappings."""
    return isinstance(annotation, type) and issubclass(annotation, RootModel)


def typed(text: Any, annotation: Any) -> Any:
    """The value that an override's text means for a setting of this type; what is no text is a value already.

    Text stays as it is where the setting takes text; `null` is None where None is allowed; the rest is read as YAML
    (numbers, true and false, `[1, 2]`, `{a: 1}`). Text that does not fit is returned as it is, for the check to refuse.
    """
    members = alternatives(annotation)
    if not isinstance(text, str):
        return text
    if text == "null" and type(None) in members:
        return None
    for member in members:
        if get_origin(member) in (list, tuple) and text.lstrip().startswith("["):
            return _texts(text) if str in get_args(member) else yaml_text.value(text)
        if _is_mapping(member) and text.lstrip().startswith(("{", "[")):  # some may be written as a list of names
            return yaml_text.value(text)
    if any(member is str or member is Duration or _is_root(member) for member in members):
        return text
    literals = [value for m in members if get_origin(m) is Literal for value in get_args(m)]
    if text in literals:
        return text
    if Any in members:
        return yaml_text.value(text)
    value = yaml_text.value(text)
    if int in members and float not in members and isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (bool, int, float)) else text


def _texts(text: str) -> Any:
    """A flow list whose members stay text: `[001, no]` is "001" and "no", and `[*.scale]`, which is no YAML (a shell
    took its quotes away), is "*.scale"."""
    try:
        return yaml.load(text, Loader=yaml.BaseLoader)  # builds text, lists and mappings only
    except (yaml.YAMLError, RecursionError):
        plain = re.fullmatch(r"\[([^\[\]{}'\"]*\*[^\[\]{}'\"]*)\]", text.strip())
        return text if plain is None else [part.strip() for part in plain[1].split(",")]
