"""Nested values, as YAML and JSON give them, by dotted paths such as `optimizer.learning_rate`."""

from collections.abc import Iterator
from typing import Any

Tree = dict[str, Any]
"""Nested values as YAML gives them."""
ABSENT = object()
"""Stands for a value that a tree does not have; None is null."""


def get(tree: Tree, path: str) -> Any:
    """The value at a dotted path, `ABSENT` for no such path."""
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


def merge(base: Tree, over: Tree) -> Tree:
    """`base` with the values of `over`: mappings are merged, everything else is replaced."""
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def paths(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no mapping (or an empty one) with its dotted path."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from paths(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def nested(path: str, value: Any) -> dict[str, Any]:
    """`a.b`, 1 -> {"a": {"b": 1}}."""
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value
