"""Recipes as files: finding one by name, reading its YAML, following `extends`, resolving interpolation.

Everything here is torch-free and imports no plug-in; what the keys mean is checked in `config`.
"""

import difflib
import re
from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from daguerre.config.aliases import foreign
from daguerre.errors import UserError
from daguerre.formatting import first_line
from daguerre.regular import check_regular
from daguerre.remote import local_copy
from daguerre.storage import address

FOLDER = Path(__file__).parent.parent / "recipes"
BROKEN = (ValueError, KeyError, AttributeError, TypeError, IndexError, OverflowError, RecursionError)
"""What YAML's constructors raise for texts that are no values of their kind, such as `!!int 1e5`."""
_DEPTH = 50
_NOT_FOUND = re.compile(r"^Interpolation key '(.*)' not found")
_TOO_DEEP = f"lists and groups are nested too deeply: at most {_DEPTH} levels"
_BITS = 1024
Tree = dict[str, Any]
"""Nested values as YAML gives them."""
ABSENT = object()
"""Stands for a value that a tree does not have; None is null."""


@dataclass(frozen=True)
class Layer:
    """One recipe file: where it is and what it says, interpolations not resolved, `extends` taken out."""

    path: Path
    tree: Tree

    @property
    def is_shipped(self) -> bool:
        """True for a recipe of the package."""
        return self.path.parent == FOLDER

    @property
    def is_of_a_run(self) -> bool:
        """True for the config of a run, which says everything."""
        return self.path.name == "config.yaml"


def shipped() -> dict[str, Path]:
    """The recipes of the package by name, sorted."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def locate(recipe: str, beside: Path | None = None) -> Path:
    """The file of a recipe: a shipped name, a YAML file or a run folder, also one in an object store. Relative paths
    may be meant `beside` a file.

    The name of a shipped recipe is that recipe; write `./name` for a file or folder that has the same name. A file of
    another trainer that is not there is the shipped recipe that stands for it.
    """
    known = ", ".join(shipped()) or "none"
    if not recipe:
        raise UserError(f"no recipe given. Pass a shipped one ({known}), a YAML file or a run folder", code="missing")
    if recipe in shipped():
        return shipped()[recipe]
    if address.is_remote(recipe):
        return local_copy.located(recipe) / "config.yaml"
    path = (beside.parent if beside else Path()) / Path(recipe).expanduser()
    if path.is_dir():
        if not (path / "config.yaml").is_file():
            raise UserError(
                f"{recipe} is a folder without a config.yaml, so it is neither a run folder nor a recipe",
                code="missing",
            )
        return path / "config.yaml"
    if path.is_file():
        return path
    if name := stand_in(recipe):
        return shipped()[name]
    if what := foreign.later(recipe):
        raise UserError(f"there is no recipe {recipe!r}, and no recipe is used in its place: {what}", code="unknown")
    if len(Path(recipe).parts) > 1:
        raise UserError(f"{recipe}: no such run folder or recipe file ({path.absolute()})", code="missing")
    near = difflib.get_close_matches(recipe, shipped(), n=1)
    hint = f"Did you mean {near[0]}? `daguerre recipes` lists all." if near else f"The shipped recipes are {known}."
    raise UserError(f"there is no recipe {recipe!r}: no such file or run folder. {hint}", code="unknown")


def stand_in(recipe: str) -> str | None:
    """The shipped recipe that stands for a file of another trainer; None where the file is there, and for others."""
    name = foreign.stands_for(recipe)
    return name if name in shipped() and not Path(recipe).expanduser().is_file() else None


def layers(recipe: str) -> list[Layer]:
    """A recipe and all that it extends, the outermost base first. UserError for a file that cannot be read."""
    found: list[Layer] = []
    path, name = locate(recipe), recipe
    while True:
        if any(path.resolve() == layer.path.resolve() for layer in found):
            chain = " -> ".join([*(str(layer.path) for layer in found), str(path)])
            raise UserError(f"{name}: `extends` refers back to itself: {chain}")
        tree = read(path)
        if theirs := foreign.trainer(tree):
            raise UserError(
                f"{path} is a config of {theirs}: `daguerre convert config {path}` turns it into a recipe and lists "
                "what could not be converted"
            )
        if what := foreign.unread(tree):
            raise UserError(f"{path} is {what}", code="unsupported")
        base = tree.pop("extends", None)
        found.append(Layer(path, tree))
        if base is None:
            return found[::-1]
        if not isinstance(base, str):
            raise UserError(f"{path}: extends takes one shipped name or path, got {base!r}")
        path, name = locate(base, beside=path), base


def read(path: Path) -> Tree:
    """The mapping in a YAML file, its interpolations as written. UserError says what is wrong, and in which line."""
    if foreign.is_format(path):
        raise UserError(f"{path} is not a recipe: `daguerre convert config {path}` converts another trainer's config")
    try:
        check_regular(path)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    try:
        tree: Any = deepcopy(_values(text)) if text.strip() else {}
    except yaml.MarkedYAMLError as error:
        raise UserError(f"{path}{_place(error, text)}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {first_line(error)}") from error
    except RecursionError:
        raise UserError(f"{path}: {_TOO_DEEP}") from None
    except BROKEN as error:
        raise UserError(f"{path}{_odd_value(text) or f': not valid YAML: {first_line(error)}'}") from error
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a recipe is a mapping of keys to values, this is a {type(tree).__name__}")
    _check_keys(tree, path)
    if why := excess(tree):
        raise UserError(f"{path}: {why}")
    return tree


@lru_cache(maxsize=64)
def _values(text: str) -> Any:
    """The values of a YAML text, its interpolations as written. A command reads some files twice."""
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def _place(error: yaml.MarkedYAMLError, text: str) -> str:
    reason = (error.problem or str(error)).split(" See https")[0].strip()
    if error.problem_mark is None:
        return f": not valid YAML: {reason}"
    number = error.problem_mark.line
    line = text.splitlines()[number].strip() if number < len(text.splitlines()) else ""
    hint = '; inside {} and [] write "???" in quotes' if "???" in line else ""
    return f", line {number + 1}: not valid YAML: {reason}{hint}" + (f"\n    {line}" if line else "")


def _odd_value(text: str) -> str:
    """Line and text of the first value that is not of the kind that its tag names; "" if none is found."""
    loader = yaml.SafeLoader(text)
    try:
        nodes = [loader.get_single_node()]
        while nodes and isinstance(node := nodes.pop(0), yaml.Node):
            if isinstance(node, yaml.ScalarNode):
                with_tag = node
                loader.construct_object(with_tag)
            else:
                inner = [each for pair in node.value for each in (pair if isinstance(pair, tuple) else (pair,))]
                nodes = [*inner, *nodes]
    except yaml.MarkedYAMLError:
        return ""
    except BROKEN:
        kind = with_tag.tag.rpartition(":")[2]
        value = with_tag.value if len(with_tag.value) <= 40 else with_tag.value[:36] + " ..."
        return f", line {with_tag.start_mark.line + 1}: {value!r} is not of the kind {kind!r}, or is too long"
    return ""


def excess(value: Any, depth: int = 0) -> str:
    """The message for a value that can be read but is too large to work with; "" of all others."""
    if depth > _DEPTH:
        return _TOO_DEEP
    if isinstance(value, int) and value.bit_length() > _BITS:
        return f"it has a number of more than {_BITS} bits, too large for any setting"
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((why for inner in below if (why := excess(inner, depth + 1))), "")


def _check_keys(tree: Tree, path: Path) -> None:
    for name, value in tree.items():
        if not isinstance(name, str):
            raise UserError(f"{path}: the key {name!r} is a {type(name).__name__}, not text: write it in quotes")
        if isinstance(value, dict):
            _check_keys(value, path)


def merge(base: Tree, over: Tree) -> Tree:
    """`base` with the values of `over`: mappings are merged, everything else is replaced."""
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def resolve(tree: Tree, verbatim: Tree, source: str) -> tuple[Tree, list[str]]:
    """Values with every `${path}` replaced, and the paths that still say `???` (taken out of the values).

    `verbatim` is merged on top and its text is taken as it is: a `${` in it is no interpolation, though the recipe's
    interpolations see its values. Only paths of the recipe can be referred to; resolvers such as `oc.env` are gone.
    `source` is named in the UserError.
    """
    for name in list(BaseContainer._resolvers):
        OmegaConf.clear_resolver(name)
    whole = deepcopy(merge(tree, escaped(verbatim)))
    if _is_resolved(whole):
        return whole, []
    try:
        config = OmegaConf.create(whole)
        # Keys that refer to a missing one are missing to OmegaConf too; only the first cause is worth a line.
        missing = {path: _remove(whole, path) for path in sorted(OmegaConf.missing_keys(config))}
        resolved: Any = OmegaConf.to_container(OmegaConf.create(whole), resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{source}: {_interpolation_error(error, whole)}") from error
    return resolved, [path for path, value in missing.items() if value == "???"]


def _is_resolved(value: Any) -> bool:
    """True of values that OmegaConf, which takes a hundred times longer, would give back as they are."""
    if isinstance(value, dict):
        return all(map(_is_resolved, value.values()))
    if isinstance(value, list):
        return all(map(_is_resolved, value))
    return not isinstance(value, str) or ("${" not in value and value != "???")


def _interpolation_error(error: OmegaConfBaseException, whole: Tree) -> str:
    """The text for what a recipe refers to that is not there; `whole` are its values with the overrides."""
    where = getattr(error, "full_key", None)
    text = first_line(error)
    if found := _NOT_FOUND.search(text):
        target, setting = found[1], re.sub(r"\[\d+\]", "", str(where or "the setting"))
        above = [target.rsplit(".", depth)[0] for depth in range(target.count("."), -1, -1)]
        gone = next((path for path in above if get(whole, path) in (ABSENT, None)), target)
        return (
            f"{where} refers to {target}, and there is no {gone} (an override with null removes it): give {setting} a "
            "value of its own, too"
        )
    if "Unsupported interpolation type" in text:
        text += " (a recipe can refer to its own paths only, as in ${data.resolution})"
    return f"{where}: {text}" if where else text


def escaped(value: Any, kept: Collection[str] = ()) -> Any:
    """The value with `${` in its text written so that it is read back as text, but for the texts that are `kept`."""
    if isinstance(value, dict):
        return {name: escaped(inner, kept) for name, inner in value.items()}
    if isinstance(value, list):
        return [escaped(inner, kept) for inner in value]
    if isinstance(value, str) and value in kept:
        return value
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _remove(tree: Any, path: str) -> Any:
    """Take a path (`a.b[0].c`, as OmegaConf writes it) out of the tree; what stood there."""
    *parents, last = path.replace("[", ".").replace("]", "").split(".")
    for name in parents:
        tree = tree[int(name)] if isinstance(tree, list) else tree.get(name, {})
    if isinstance(tree, dict) and last not in tree:
        return ABSENT  # a key that holds a dot is no path
    if isinstance(tree, list):
        value, tree[int(last)] = tree[int(last)], None
        return value
    return tree.pop(last)


def get(tree: Tree, path: str) -> Any:
    """The value at a dotted path, `ABSENT` if there is none."""
    value: Any = tree
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return ABSENT
        value = value[name]
    return value


def without(tree: Tree, path: str) -> Tree:
    """A copy of the tree that lacks a dotted path."""
    name, _, rest = path.partition(".")
    if not rest:
        return {other: value for other, value in tree.items() if other != name}
    return {**tree, name: without(tree[name], rest)}


def paths(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no mapping (or an empty one) with its dotted path."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from paths(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
