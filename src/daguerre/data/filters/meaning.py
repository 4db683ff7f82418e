"""What goes together in a filter expression: each node is made here, or refused because it would mean nothing.

Every refusal is a UserError that says why; where in the text, the parser knows (`filter_grammar`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from daguerre.data.filters import expression as tree
from daguerre.data.filters.expression import Condition, Node, Value
from daguerre.errors import UserError

NAME_CHARACTERS = 200
"""Longest name of a field."""


def name(given: str) -> str:
    """The name, if a field can have it."""
    if not 0 < len(given) <= NAME_CHARACTERS or not given.isprintable():
        raise UserError(f"a field's name has 1 to {NAME_CHARACTERS} printable characters")
    return given


def value(node: Node) -> Value:
    """The node, if it is a value."""
    if isinstance(node, Condition):
        raise UserError("expected a value, found a condition: comparisons are joined by and, or, not")
    return node


def number(node: Node) -> Value:
    """The node, if it is a number or can be one."""
    if isinstance(node, tree.Text | tree.Truth):
        raise UserError("expected a number: nothing can be computed with text, true or false")
    return value(node)


def condition(node: Node) -> Condition:
    """The node, if it is a condition; a field alone is one that is true or false itself."""
    if isinstance(node, tree.Field):
        return tree.Flag(node.name)
    if isinstance(node, Value):
        raise UserError("expected a condition such as width >= 512, found a value")
    return node


def arithmetic(sign: str, left: Value, right: Value) -> Value:
    """`left sign right`, if its constants can be computed."""
    if tree.constant(right) == 0 and sign in ("/", "//", "%"):
        raise UserError("a division by 0")
    node = tree.Arithmetic(sign, left, right)
    result = tree.constant(node)
    if result is not None and not math.isfinite(result):
        raise UserError("this number does not fit into 64 bits")
    return node


def compare(sign: str, left: Value, right: Value) -> Condition:
    """`left sign right`, if its sides can be compared."""
    if not (_has_field(left) or _has_field(right)):
        raise UserError("there is no field in this comparison: it is the same for every sample")
    if left == right:
        raise UserError("both sides are the same")
    kinds = {_kind(left), _kind(right)} - {"a field"}
    if len(kinds) > 1:
        raise UserError(f"{' cannot be compared with '.join(sorted(kinds))}")
    if kinds == {_TRUTH} and sign not in ("==", "!="):
        raise UserError("true and false are compared by == and != only")
    return tree.Compare(sign, left, right)


def among(subject: Value, members: tuple[Value, ...], negated: bool) -> Condition:
    """`subject in [members]`, if they can be equal."""
    if not _has_field(subject):
        raise UserError("there is no field before this: it is the same for every sample")
    kinds = {_kind(node) for node in (subject, *members)} - {"a field"}
    if len(kinds) > 1:
        raise UserError(f"{' cannot be compared with '.join(sorted(kinds))}")
    return tree.Among(subject, members, negated)


def whole(given: Condition) -> Condition:
    """The condition, if no field is two kinds of thing in it."""
    texts = _names(given, {"text"})
    both = sorted(texts & _names(given, {"number", "flag"}))
    if both:
        raise UserError(f"the field {tree.name_text(both[0])} is compared with text, and used as a number")
    return given


_TRUTH = "true or false"


def _kind(node: Value) -> str:
    kinds: dict[type, str] = {tree.Text: "text", tree.Truth: _TRUTH, tree.Field: "a field"}
    return kinds.get(type(node), "a number")


def _has_field(node: Value) -> bool:
    return any(True for _ in tree.uses(node))


def _names(node: Node, kinds: Iterable[str]) -> set[str]:
    return {use.name for use in tree.uses(node) if use.kind in kinds}
