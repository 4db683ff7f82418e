"""YAML as people write it: files and single values are read with messages, and `${path}` is replaced.

Only paths of the same document can be referred to, and nothing of a file is ever run.
"""

import math
import re
from collections.abc import Collection
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from daguerre.errors import UserError
from daguerre.formatting import called, first_line
from daguerre.regular import check_regular
from daguerre.trees import ABSENT, Tree, get, merge

BROKEN = (ValueError, KeyError, AttributeError, TypeError, IndexError, OverflowError, RecursionError)
"""What YAML's constructors raise for texts that are no values of their kind, such as `!!int 1e5`."""
_DEPTH = 50
_NOT_FOUND = re.compile(r"^Interpolation key '(.*)' not found|Error trying to access ([\w.]+): node")
_TOO_DEEP = f"lists and groups are nested too deeply: at most {_DEPTH} levels"
_BITS = 1024


def read(path: Path) -> Tree:
    """The mapping in a YAML file, its interpolations as written. UserError says what is wrong, and in which line."""
    try:
        check_regular(path)
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8, as a recipe is: give a .yaml file") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    return parse(text, path)


def parse(text: str, path: Path) -> Tree:
    """The mapping in the text of a YAML file, which messages name. UserError says what is wrong, and in which line."""
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
        raise UserError(f"{path}: a recipe is a mapping of keys to values, this is {called(tree)}")
    _check_keys(tree, path)
    if why := excess(tree):
        raise UserError(f"{path}: {why}")
    return tree


@lru_cache(maxsize=256)
def _values(text: str) -> Any:
    """The values of a YAML text, its interpolations as written. A command reads some files twice, and some all
    recipes."""
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


def _check_keys(tree: Tree, path: Path) -> None:
    for name, value in tree.items():
        if not isinstance(name, str):
            raise UserError(f"{path}: the key {name!r} is {called(name)}, not text: write it in quotes")
        if isinstance(value, dict):
            _check_keys(value, path)


def excess(value: Any, depth: int = 0) -> str:
    """The message for a value that can be read but is too large to work with; "" of all others."""
    if depth > _DEPTH:
        return _TOO_DEEP
    if isinstance(value, int) and value.bit_length() > _BITS:
        return f"it has a number of more than {_BITS} bits, too large for any setting"
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((why for inner in below if (why := excess(inner, depth + 1))), "")


def value(text: str) -> Any:
    """Text as a YAML scalar, flow list or flow mapping; text that is not YAML stays text."""
    return deepcopy(_value(text))


@lru_cache(maxsize=1024)
def _value(text: str) -> Any:
    """`value`. A command reads each of its settings several times."""
    if "\n" in text or not text.strip():
        return text
    try:
        value = OmegaConf.to_container(OmegaConf.create({"value": OmegaConf.create(f"- {text}")}), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, *BROKEN):
        return text
    assert isinstance(value, dict)
    if excess(value):
        return text
    item = value["value"][0] if value["value"] else text
    return text if isinstance(item, float) and math.isnan(item) and text.strip().lower() != ".nan" else item


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
        target, setting = found[1] or found[2], re.sub(r"\[\d+\]", "", str(where or "the setting"))
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
