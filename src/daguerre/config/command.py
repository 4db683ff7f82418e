"""The `key=value` of a command line as values of a recipe: names of other trainers and short forms become settings."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from daguerre import plugins, trees
from daguerre.config import fields, overrides, recipe, short_forms
from daguerre.config.errors import Problem, group, unknown
from daguerre.config.overrides import Pair
from daguerre.config.short_forms import MAPPINGS
from daguerre.errors import UserError
from daguerre.foreign.names import lookup
from daguerre.formatting import shown
from daguerre.settings import Settings
from daguerre.trees import Tree


def values(root: type[Settings], tree: Tree, given: Sequence[str], notices: list[str]) -> tuple[Tree, list[Problem]]:
    """The values that `key=value` overrides set on a recipe's tree, and what is wrong with them.

    Names of plug-ins are set first, wherever they stand: they decide which settings the others can mean.
    """
    problems: list[Problem] = []
    raw: list[tuple[str, str]] = []
    for override in given:
        try:
            raw.append(overrides.pair(override))
        except UserError as error:
            problems.append(Problem(override, str(error)))

    def refuse(label: str, why: str, *text: str) -> None:
        problems.append(Problem(label, why, *text))

    found: Tree = {}

    def put(pairs: Sequence[Pair]) -> None:
        ours = short_forms.long(pairs, trees.merge(tree, found), problems)
        first = [pair for pair in ours if pair[1].rpartition(".")[0] in MAPPINGS or pair[1] in MAPPINGS]
        first += [pair for pair in ours if pair not in first and _names_plugin(root, pair[1])]
        for pair in first:
            problems.extend(_set(root, found, tree, pair, notices))
        rest = [pair for pair in ours if pair not in first]
        for pair in short_forms.with_sections(root, trees.merge(tree, found), rest):
            problems.extend(_set(root, found, tree, pair, notices))

    put(lookup.pairs(raw, notices, refuse))
    put(lookup.relative_pairs(raw, short_forms.flat(trees.merge(tree, found)), notices, refuse))
    return found, problems


@lru_cache(maxsize=1024)
def _names_plugin(root: type[Settings], path: str) -> bool:
    section, _, key = path.rpartition(".")
    plugin = fields.plugin_sections(root, trees.nested(section, {}) if section else {}).get(section)
    return plugin is not None and plugin.key == key


def _set(root: type[Settings], found: Tree, tree: Tree, pair: Pair, notices: list[str]) -> list[Problem]:
    """Put one override into `found`, or say why it cannot be."""
    key, path, given = pair
    below = trees.merge(tree, found)
    out = given in (None, "null")
    if not out and not short_forms.may_be_added(path, below):
        why = "this recipe has one source without a name: add data.source=mix to train on named sources instead"
        return [_with_recipes(Problem(key, why, given), path)]
    leaves, sections = short_forms.begun(root, below, path)
    try:
        meant = overrides.find(path, leaves, [*sections])
    except UserError as error:
        return [Problem(key, str(error), given)]
    if meant is None:
        if _of_no_plugin(root, below, path):
            return []  # the check refuses the plug-in's name; what its keys would be, nobody knows
        optional = [name for name, leaf in leaves.items() if fields.plugin_of(leaf.field)]
        if above := next((name for name in optional if path.startswith(f"{name}.")), ""):
            return [Problem(key, f"{above} is null: choose one, {above}={fields.allowed(leaves[above])}", given)]
        sought = path if path.startswith("data.sources.") else key  # other sources may have it: data.path
        return [_with_recipes(replace(unknown(sought, given, leaves, [*sections]), path=key), path)]
    target, inside = meant
    held = trees.get(below, target)
    if inside and isinstance(held, str | list):  # a group in its place would drop it
        return [Problem(key, f"{target} is no group of fields here: give it whole, in place of {shown(held)}", given)]
    section = sections.get(target)
    whole = isinstance(given, dict) or (isinstance(given, str) and given.lstrip().startswith("{"))
    if section is not None and not whole and not (out and (section.named or section.optional)):
        return [group(key, given, leaves, target)]
    full = ".".join([target, *inside])
    leaf = None if inside else leaves.get(target)
    text = lookup.value(full, given)
    value = overrides.typed(text, Any if leaf is None else leaf.field.annotation)
    before = trees.get(found, full)
    merged = isinstance(before, dict) and isinstance(value, dict)  # both hold
    if before is not trees.ABSENT and before != value and not merged:
        notices.append(f"{full} is given twice: {shown(value)} is used, {shown(before)} is ignored")
    found.update(trees.merge(found, trees.nested(full, value)))
    return []


def _with_recipes(problem: Problem, path: str) -> Problem:
    """Names of DreamBooth's sets mean something on recipes that have both."""
    if not path.startswith(("data.sources.instance.", "data.sources.class.")):
        return problem
    recipes = [name for name in recipe.shipped() if name.endswith("dreambooth")]
    return replace(problem, text=f"{problem.text}; the sets `instance` and `class` are in {' and '.join(recipes)}")


def _of_no_plugin(root: type[Settings], tree: Tree, path: str) -> bool:
    """True if a path lies in a section that names a plug-in which does not exist."""
    for section, plugin in fields.plugin_sections(root, tree).items():
        name = trees.get(tree, f"{section}.{plugin.key}")
        if path.startswith(f"{section}.") and name is not trees.ABSENT and not plugins.exists(plugin.kind, name):
            return True
    return False
