"""The `key=value` of a command line as values of a recipe: names of other trainers and short forms become settings."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from daguerre import plugins
from daguerre.config import fields, overrides, recipe, short_forms
from daguerre.config.aliases import lookup
from daguerre.config.aliases.relative import RELATIVE, Look, look_in
from daguerre.config.aliases.values import Meaning
from daguerre.config.errors import Problem, group, shown, unknown
from daguerre.config.overrides import Pair
from daguerre.config.recipe import Tree
from daguerre.config.short_forms import MAPPINGS
from daguerre.errors import UserError
from daguerre.settings import Settings


def values(root: type[Settings], tree: Tree, given: Sequence[str], notices: list[str]) -> tuple[Tree, list[Problem]]:
    """The values that `key=value` overrides set on a recipe's tree, and what is wrong with them.

    Names of plug-ins are set first, wherever they stand: they decide which settings the others can mean.
    """
    problems: list[Problem] = []
    raw: dict[str, str] = {}
    meanings: list[tuple[str, Meaning]] = []

    def read(key: str, text: str, look: Look | None = None) -> Meaning:
        try:
            meaning = lookup.translate(key, text, look)
        except UserError as error:
            problems.append(Problem(key, str(error), text))
            return Meaning()
        notices.extend(meaning.notices)
        return meaning

    for override in given:
        try:
            key, text = overrides.pair(override)
        except UserError as error:
            problems.append(Problem(override, str(error)))
            continue
        raw[key] = text
        meanings.append((key, read(key, text)))
    pairs = [pair for key, meaning in meanings for pair in _pairs(key, meaning)]
    pairs += _implied(pairs, meanings, problems)
    pairs = _without_idle_names(pairs, list(raw.items()), notices)
    found: Tree = {}

    def put(pairs: Sequence[Pair]) -> None:
        ours = short_forms.long(pairs, recipe.merge(tree, found), problems)
        first = [pair for pair in ours if pair[1].rpartition(".")[0] in MAPPINGS or pair[1] in MAPPINGS]
        first += [pair for pair in ours if pair not in first and _names_plugin(root, pair[1])]
        for pair in first:
            problems.extend(_set(root, found, tree, pair, notices))
        rest = [pair for pair in ours if pair not in first]
        for pair in short_forms.with_sections(root, recipe.merge(tree, found), rest):
            problems.extend(_set(root, found, tree, pair, notices))

    put(pairs)
    look = look_in(raw, short_forms.flat(recipe.merge(tree, found)))
    put([pair for key in raw if key in RELATIVE for pair in _pairs(key, read(key, raw[key], look))])
    return found, problems


def _names_plugin(root: type[Settings], path: str) -> bool:
    section, _, key = path.rpartition(".")
    plugin = fields.plugin_sections(root, overrides.nested(section, {}) if section else {}).get(section)
    return plugin is not None and plugin.key == key


def _pairs(key: str, meaning: Meaning) -> list[Pair]:
    return [(key if key == path else f"{key} ({path})", path, value) for path, value in meaning.values]


def _implied(pairs: Sequence[Pair], meanings: Sequence[tuple[str, Meaning]], problems: list[Problem]) -> list[Pair]:
    """Overrides that follow from other trainers' names, for settings that none sets."""
    given = {path for _, path, _ in pairs}
    found = []
    for key, path, find in ((key, *implied) for key, meaning in meanings for implied in meaning.implied):
        if path in given or path.rpartition(".")[2] in given:  # as a whole path, or by the setting's own name
            continue
        try:
            text = find()
        except UserError as error:
            problems.append(Problem(key, str(error)))
            break
        if text is not None:
            found.append((f"{key} ({path})", path, text))
    return found


def _without_idle_names(
    pairs: Sequence[Pair], names_given: Sequence[tuple[str, str]], notices: list[str]
) -> list[Pair]:
    """The overrides without names of other trainers that have no effect beside the rest; each is one notice."""
    kept, given = [], [*((path, value) for _, path, value in pairs), *names_given]
    for key, path, value in pairs:
        said = lookup.idle_beside(key.partition(" ")[0], given)
        if said is None:
            kept.append((key, path, value))
        else:
            notices.append(said)
    return kept


def _set(root: type[Settings], found: Tree, tree: Tree, pair: Pair, notices: list[str]) -> list[Problem]:
    """Put one override into `found`, or say why it cannot be."""
    key, path, given = pair
    below = recipe.merge(tree, found)
    out = given in (None, "null")
    if not out and not short_forms.may_be_added(path, below):
        why = "this recipe has one source without a name: add data.source=mix to train on named sources instead"
        return [_with_recipes(Problem(key, why, given), path)]
    begun = short_forms.begun(root, below, path)
    leaves, sections = fields.leaves(root, begun), fields.sections(root, begun)
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
        return [_with_recipes(unknown(key, given, leaves, [*sections]), path)]
    target, inside = meant
    section = sections.get(target)
    whole = isinstance(given, dict) or (isinstance(given, str) and given.lstrip().startswith("{"))
    if section is not None and not whole and not (out and (section.named or section.optional)):
        return [group(key, given, leaves, target)]
    full = ".".join([target, *inside])
    leaf = None if inside else leaves.get(target)
    text = lookup.value(full, given)
    value = overrides.typed(text, Any if leaf is None else leaf.field.annotation)
    before = recipe.get(found, full)
    merged = isinstance(before, dict) and isinstance(value, dict)  # both hold
    if before is not recipe.ABSENT and before != value and not merged:
        notices.append(f"{full} is given twice: {shown(value)} is used, {shown(before)} is ignored")
    found.update(recipe.merge(found, overrides.nested(full, value)))
    return []


def _with_recipes(problem: Problem, path: str) -> Problem:
    """Names of DreamBooth's sets mean something on recipes that have both."""
    if not path.startswith("data.sources."):
        return problem
    recipes = [name for name in recipe.shipped() if name.endswith("dreambooth")]
    return replace(problem, text=f"{problem.text}; the sets `instance` and `class` are in {' and '.join(recipes)}")


def _of_no_plugin(root: type[Settings], tree: Tree, path: str) -> bool:
    """True if a path lies in a section that names a plug-in which does not exist."""
    for section, plugin in fields.plugin_sections(root, tree).items():
        name = recipe.get(tree, f"{section}.{plugin.key}")
        if path.startswith(f"{section}.") and name is not recipe.ABSENT and name not in plugins.names(plugin.kind):
            return True
    return False
