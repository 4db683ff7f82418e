"""The ways of writing what is trained on: all of them become the mapping `data.sources`.

    data: {sources: {photos: {source: folder, path: DIR}, art: {source: csv, path: FILE}}, resolution: 512}
    data: {source: folder, path: DIR, resolution: 512}          a mapping of one, called `images`
    data.path=DIR                                               of the only source, whatever it is called

`null` in the place of a source's settings takes it out. A flat `data.source` takes the place of several.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from daguerre.config import recipe
from daguerre.config.overrides import Pair
from daguerre.config.recipe import Tree
from daguerre.data.settings import NAMELESS, DataSettings

_MIX = "mix"
"""What `data.source` was called of several sources; it says that the one without a name of its own is none of them."""
_SHARED = (*DataSettings.model_fields,)


def members(tree: Tree) -> dict[str, Any]:
    """The sources of a tree by their names; null for those that it takes out."""
    found = recipe.get(tree, "data.sources")
    return dict(found) if isinstance(found, Mapping) else {}


def only(tree: Tree) -> str | None:
    """The name of the only source; `images` where there is none yet, None where there are several."""
    there = [name for name, own in members(tree).items() if own is not None]
    return None if len(there) > 1 else there[0] if there else NAMELESS


def mapped(base: Tree, over: Tree) -> Tree:
    """A layer over `base`, which holds the mapping: now it holds it, too. What only one of several sources can mean
    stays where it is, for the check to refuse."""
    data = over.get("data")
    flat = {name: value for name, value in data.items() if name not in _SHARED} if isinstance(data, dict) else {}
    if not flat or not isinstance(data, dict):
        return over
    rest: Tree = {name: value for name, value in data.items() if name in _SHARED}
    target = only(recipe.merge(base, {"data": rest}))
    found: Tree = {}
    if flat.get("source") == _MIX:
        del flat["source"]
        rest |= flat
        found = {NAMELESS: None} if NAMELESS in members(base) and NAMELESS not in members(over) else {}
    elif target is not None:
        found = {target: flat}
    elif "source" in flat:
        found = {**dict.fromkeys(members(base)), NAMELESS: flat}
    else:
        rest |= flat
    return {**over, "data": recipe.merge(rest, {"sources": found})}


def without_nameless(base: Tree, over: Tree) -> Tree:
    """A layer that takes out the source of `base` that has no name where it gives others with names of their own."""
    given = members(over)
    if members(base).get(NAMELESS) is None or NAMELESS in given or all(own is None for own in given.values()):
        return over
    return recipe.merge(over, {"data": {"sources": {NAMELESS: None}}})


def paths(given: Sequence[Pair], tree: Tree) -> list[Pair]:
    """Overrides with paths of the mapping, those that take sources out first."""
    layer: Tree = {}
    for _, path, text in given:
        name = path.removeprefix("data.sources.").partition(".")[0]
        if path == f"data.sources.{name}" and text == "null":
            layer = recipe.merge(layer, {"data": {"sources": {name: None}}})
        elif path.startswith("data.sources."):
            layer = recipe.merge(layer, {"data": {"sources": {name: {}}}})
        elif path == "data.source":
            layer = recipe.merge(layer, {"data": {"source": text}})
    found = members(mapped(tree, layer))
    label = next((label for label, path, _ in given if path == "data.source"), "")
    out = [(label, f"data.sources.{name}", "null") for name, own in found.items() if own is None]
    target = only(recipe.merge(tree, {"data": {"sources": found}}))
    done = {("data.source", _MIX), *((path, text) for _, path, text in out)}
    kept = [pair for pair in given if pair[1:] not in done]
    return [*out, *((label, path if target is None else long(path, target), text) for label, path, text in kept)]


def may_stand_beside(path: str, tree: Tree) -> bool:
    """True if a setting is of a source that is there, or may be added: beside those that have names."""
    there = members(tree)
    known = not path.startswith("data.sources.") or path.split(".")[2] in there
    return known or there.get(NAMELESS) is None


def long(path: str, name: str) -> str:
    """The path of a setting in the mapping, where `name` is the only source."""
    section, _, rest = path.partition(".")
    inside = section == "data" and rest and rest.partition(".")[0] not in _SHARED
    return f"data.sources.{name}.{rest}" if inside else path


def short(text: str, tree: Tree) -> str:
    """A text in which the settings of the only source are written flat, unless it has a name of its own."""
    return re.sub(rf"\bdata\.sources\.{NAMELESS}(?![\w-])", "data", text) if only(tree) == NAMELESS else text


def flat(tree: Tree) -> Tree:
    """A tree in which the settings of the only source stand in `data`, too."""
    own: Tree | None = members(tree).get(only(tree) or "")
    return recipe.merge({"data": own}, tree) if own else tree


def with_long_references(value: Any, name: str) -> Any:
    """A tree whose `${data.path}` and the like refer into the mapping, where `name` is the only source."""
    if isinstance(value, dict):
        return {key: with_long_references(inner, name) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_long_references(inner, name) for inner in value]
    if isinstance(value, str) and "${data." in value:
        return re.sub(r"\$\{(data\.[\w.]+)\}", lambda match: f"${{{long(match[1], name)}}}", value)
    return value
