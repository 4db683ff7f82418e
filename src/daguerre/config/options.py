"""The arguments of the `data` verbs: options of their own, and which data, as paths or as the data section of a recipe.

Only the data section is read, so nothing here needs a model or torch, and a recipe that lacks other settings serves.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import Field

from daguerre import plugins, trees, yaml_text
from daguerre.config import command, config, fields, merge, overrides, recipe, renamed, short_forms
from daguerre.config.errors import Problem
from daguerre.credentials import scrub
from daguerre.data.settings import DataSettings
from daguerre.data.tools import detect
from daguerre.errors import UserError
from daguerre.settings import Settings
from daguerre.trees import Tree

Options = TypeVar("Options", bound=Settings)
_KEY = re.compile(r"(--)?[A-Za-z_][\w.-]*")
_KIND_KEYS = {"data.source", "source", "dataset_name"}


class DataRecipe(Settings):
    """The part of a recipe that says what is trained on."""

    seed: int = Field(0, ge=0, lt=1 << 63)
    """All random numbers follow from this and the samples' ids."""
    data: DataSettings
    """What is trained on."""


@dataclass(frozen=True)
class Words:
    """A command line, sorted."""

    bare: tuple[str, ...]
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Request(Generic[Options]):
    """The request to a `data` verb."""

    what: str
    """The data as it was named, for people."""
    settings: DataSettings
    seed: int
    options: Options
    notices: tuple[str, ...]


def read(arguments: Sequence[str], options_class: type[Options]) -> Request[Options]:
    """The data and the options of a verb. UserError where either cannot be used."""
    words = split(arguments)
    options, rest = own_options(words.overrides, options_class)
    _refuse_misspelt(rest, options_class)
    if len(words.bare) == 1 and _is_recipe(words.bare[0]):
        found, notices = from_recipe(words.bare[0], rest)
        return Request(words.bare[0], found.data, found.seed, options, tuple(map(scrub, notices)))
    found, notices = from_paths(words.bare, rest)
    named = [str(getattr(source, "path", source.source)) for source in found.data.sources.values()]
    what = scrub(", ".join(words.bare or named))
    return Request(what, found.data, found.seed, options, tuple(map(scrub, notices)))


def split(arguments: Sequence[str]) -> Words:
    """Bare words and `key=value`; `-o X` is `out=X`, and `--key X` is `key=X`. A path may hold `=` behind a slash."""
    bare: list[str] = []
    given: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "-o" or (word.startswith("--") and "=" not in word):
            key = "out" if word == "-o" else word[2:]
            if not rest:
                raise UserError(f"{word} needs a value: write {key}=VALUE", code="missing")
            given.append(f"{key}={rest.pop(0)}")
        elif "=" in word and _KEY.fullmatch(word.partition("=")[0]):
            given.append(word.removeprefix("--"))
        elif word.startswith("-"):
            raise UserError(f"there is no option {word}: options are written key=value", code="unknown")
        else:
            bare.append(word)
    return Words(tuple(bare), tuple(given))


def own_options(given: Sequence[str], options_class: type[Options]) -> tuple[Options, list[str]]:
    """The verb's options, and the overrides that are none of them. ConfigError for a value that cannot be."""
    values: Tree = {}
    rest = []
    pairs = [(one, *overrides.pair(one)) for one in given]
    for override, key, text in short_forms.with_sections(options_class, {}, pairs):
        leaves = short_forms.begun(options_class, values, key)[0]
        if key not in leaves:
            rest.append(override)
        elif trees.get(values, key) is not trees.ABSENT:
            raise UserError(f"{key} is given twice", code="conflict")
        else:
            values = trees.merge(values, trees.nested(key, overrides.typed(text, leaves[key].field.annotation)))
    return config.checked(options_class, values, [], [], "the command, whose options --help explains"), rest


def _refuse_misspelt(given: Sequence[str], options_class: type[Settings]) -> None:
    """UserError for a key that is nearly an option, and that is no setting of any source either."""
    for override in given:
        key = overrides.pair(override)[0]
        near = difflib.get_close_matches(key, options_class.model_fields, n=1, cutoff=0.75)
        if near and "." not in key and key not in _of_sources():
            raise UserError(f"there is no option {key}; did you mean {near[0]}?", code="unknown")


@cache
def _of_sources() -> frozenset[str]:
    """The names of all settings of all sources."""
    return frozenset(path.rpartition(".")[2] for name in plugins.names("sources") for path in _leaves(name))


def _leaves(source: str) -> Mapping[str, fields.Leaf]:
    return fields.leaves(DataRecipe, {"data": {"sources": {source: {"source": source}}}})


def from_recipe(name: str, given: Sequence[str]) -> tuple[DataRecipe, tuple[str, ...]]:
    """The data section of a recipe with overrides, and what a user should know of how it came to be."""
    return _resolved([layer.tree for layer in recipe.layers(name)], given, name, [])


def from_paths(paths: Sequence[str], given: Sequence[str]) -> tuple[DataRecipe, tuple[str, ...]]:
    """The data section for paths: the kind is guessed, and said, unless an override names it."""
    named = {overrides.pair(override)[0] for override in given} & _KIND_KEYS
    if not paths and not named:
        shipped = ", ".join(recipe.shipped())
        raise UserError(
            f"no data given. Pass a path (folder, shards, table), or a recipe ({shipped}, a YAML file, a run folder)",
            code="missing",
            setting="data.path",
        )
    data: Tree = {}
    notices: list[str] = []
    if paths:
        _refuse_recipes(paths)
        data["path"] = paths[0] if len(paths) == 1 else list(paths)
    if not named:
        data["source"] = detect.kind(paths)
        notices.append(
            f"{', '.join(map(scrub, paths))}: read as {detect.KINDS[data['source']]} (data.source={data['source']})"
        )
    return _resolved([{"data": data}], given, "the data", notices)


def _is_recipe(word: str) -> bool:
    path = Path(word).expanduser()
    named = word in recipe.shipped() or path.suffix in (".yaml", ".yml")
    return named or (path.is_dir() and (path / "config.yaml").is_file())


def _refuse_recipes(words: Sequence[str]) -> None:
    for word in words:
        if _is_recipe(word):
            raise UserError(
                f"{word} is a recipe: give one recipe, or one or more paths, got {', '.join(words)}", code="conflict"
            )


def _resolved(
    layers: Sequence[Tree], given: Sequence[str], source: str, notices: list[str]
) -> tuple[DataRecipe, tuple[str, ...]]:
    tree: Tree = {}
    problems: list[Problem] = []
    for layer in layers:
        tree = merge.lay_over(DataRecipe, tree, renamed.layer(layer, notices, problems), notices, problems)
    values, wrong = command.values(DataRecipe, tree, renamed.given(given, notices, problems), notices)
    tree = merge.lay_over(DataRecipe, tree, values, notices, problems)
    resolved, absent = yaml_text.resolve(tree, merge.kept(values), source)
    own = merge.finished({name: resolved[name] for name in DataRecipe.model_fields if name in resolved})
    absent = [path for path in absent if path.startswith("data.")]
    of_data = [problem for problem in problems if problem.path.startswith("data.")]
    found = config.checked(DataRecipe, own, absent, [*of_data, *wrong], source)
    return found, tuple(short_forms.short(notice, tree) for notice in notices)
