"""The ways of writing a section of a plug-in that a recipe may do without, such as the condition of an adapter.

condition: {name: canny, low: 50}     the section
condition: canny                      its name alone
condition: null                       none
"""

import json
from collections.abc import Mapping, Sequence

from daguerre.config import fields, overrides, recipe
from daguerre.config.overrides import Pair
from daguerre.config.recipe import Tree
from daguerre.settings import Plugin, Settings


def mapped(root: type[Settings], base: Tree, over: Tree) -> Tree:
    """A layer over `base` whose sections hold mappings, also where it gives the name of a plug-in alone."""
    for path, plugin in fields.optional_plugins(root, recipe.merge(base, over)).items():
        if isinstance(name := recipe.get(over, path), str):
            over = recipe.merge(over, overrides.nested(path, {plugin.key: name}))
    return over


def pairs(root: type[Settings], tree: Tree, given: Sequence[Pair]) -> list[Pair]:
    """Overrides with whole paths of what is in such sections, names of plug-ins first; a word in the place of a section
    is one."""
    optional = fields.optional_plugins(root, tree)
    ends = [path.rpartition(".")[2] for path in optional]
    by_end = {end: path for end, path in zip(ends, optional, strict=True) if ends.count(end) == 1}
    found = []
    for label, path, text in given:
        head, dot, rest = path.partition(".")
        path = f"{by_end.get(head, head)}{dot}{rest}"
        value = overrides.yaml_value(text) if text.lstrip().startswith("{") else None
        if path in optional and isinstance(value, dict):
            inner = [(key, own if isinstance(own, str) else json.dumps(own)) for key, own in recipe.paths(value)]
            found += [(label, f"{path}.{key}", own) for key, own in inner]
        elif path in optional and text != "null":
            found.append((label, f"{path}.{optional[path].key}", text))
        else:
            found.append((label, path, text))
    return sorted(found, key=lambda pair: not _names(optional, pair[1]))


def begun(root: type[Settings], tree: Tree, path: str) -> Tree:
    """A tree in which a section is there that an override of this path begins."""
    section = path.rpartition(".")[0]
    return (
        recipe.merge(tree, overrides.nested(section, {})) if _names(fields.optional_plugins(root, tree), path) else tree
    )


def _names(optional: Mapping[str, Plugin], path: str) -> bool:
    section, _, key = path.rpartition(".")
    return section in optional and optional[section].key == key
