"""A filter expression as Python's syntax tree, of few kinds of nodes: its canonical text, and the fields that it uses.

Conditions are BoolOp (flat), UnaryOp with Not, Compare with one sign, Call of `missing`, and Name (a field that is true
or false itself). Values are Constant (number or text), Name, UnaryOp with USub, and BinOp. The id of a Name is a field
as it stands in an expression, in backticks where it needs them; or `true` or `false`.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

TEXT_CHARACTERS = 63
"""Longest text in an expression: fields with longer texts are not kept in indexes, so none could be equal."""
TRUTHS = ("true", "false")
KEYWORDS = frozenset({"and", "or", "not", "in", "missing"})
WORDS = KEYWORDS | {*TRUTHS, "True", "False", "lambda", "is", "if", "else", "null", "None"}
"""Words with a meaning of their own: a field of such a name stands in backticks."""
_BARE_NAME = re.compile(r"[^\W\d]\w*")
_COMPUTED: dict[type, Callable] = {ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply}
_DIVIDED: dict[type, Callable] = {ast.Div: np.divide, ast.FloorDiv: np.floor_divide, ast.Mod: np.mod}
ARITHMETIC = tuple(_COMPUTED | _DIVIDED)
DIVISIONS = tuple(_DIVIDED)


def field(name: str) -> ast.Name:
    bare = _BARE_NAME.fullmatch(name) and name not in WORDS
    return ast.Name(name if bare else "`" + name.replace("`", "``") + "`")


def field_of(node: ast.AST) -> str | None:
    """The name of the field that a node is; None for other nodes."""
    if not isinstance(node, ast.Name) or node.id in WORDS:
        return None
    return node.id[1:-1].replace("``", "`") if node.id.startswith("`") else node.id


def number(value: float) -> ast.Constant:
    return ast.Constant(int(value) if value.is_integer() and abs(value) < 1e15 else value)


def truth(value: bool) -> ast.Name:
    return ast.Name("true" if value else "false")


def joined(operator: ast.boolop, conditions: Sequence[ast.expr]) -> ast.expr:
    """The conditions joined by `and` or `or`, flat; one alone as it is."""
    flat: list[ast.expr] = []
    for condition in conditions:
        alike = isinstance(condition, ast.BoolOp) and type(condition.op) is type(operator)
        flat += condition.values if isinstance(condition, ast.BoolOp) and alike else [condition]
    return flat[0] if len(flat) == 1 else ast.BoolOp(operator, flat)


def clauses(tree: ast.expr) -> Sequence[ast.expr]:
    """The conditions that a top-level `and` joins."""
    return tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]


def canonical(tree: ast.expr) -> str:
    """The expression that reads as this tree, with as few parentheses as there can be."""
    match tree:
        case ast.BoolOp(ast.Or(), parts):
            return " or ".join(map(canonical, parts))
        case ast.BoolOp(_, parts):
            return " and ".join(f"({canonical(p)})" if isinstance(p, ast.BoolOp) else canonical(p) for p in parts)
        case ast.UnaryOp(ast.Not(), ast.BoolOp() as inner):
            return f"not ({canonical(inner)})"
        case ast.UnaryOp(ast.Not(), inner):
            return f"not {canonical(inner)}"
    return ast.unparse(tree)  # of several `and` it would put all but the first two into parentheses


class Use(NamedTuple):
    """A field where it stands in an expression, and what it must be there."""

    name: str
    kind: Literal["number", "text", "flag", "any", "missing"]
    """`flag` is true or false; `any` is of the same kind as `beside`."""
    beside: str = ""
    """The field that it is compared with."""


def uses(tree: ast.expr) -> Iterator[Use]:
    """Every place where a condition has a field, in the order of the text."""
    match tree:
        case ast.BoolOp(_, parts):
            for part in parts:
                yield from uses(part)
        case ast.UnaryOp(ast.Not(), inner):
            yield from uses(inner)
        case ast.Call(_, [inner]):
            yield from (Use(name, "missing") for name in fields(inner))
        case ast.Compare(ast.Name(), _, [ast.Name()]) if len(names := list(fields(tree))) == 2:
            yield from (Use(names[0], "any", names[1]), Use(names[1], "any", names[0]))
        case ast.Compare(left, _, [right]):
            kind: Literal["number", "text"] = "text" if is_text(left) or is_text(right) else "number"
            yield from (Use(name, kind) for name in fields(tree))
        case ast.Name():
            yield from (Use(name, "flag") for name in fields(tree))


def fields(node: ast.AST) -> Iterator[str]:
    """The fields in a node, in the order of the text."""
    if (name := field_of(node)) is not None:
        yield name
    for child in ast.iter_child_nodes(node):
        yield from fields(child)


def is_text(node: ast.expr) -> bool:
    """Says whether a node is a quoted text, or a list of them."""
    if isinstance(node, ast.List):
        return is_text(node.elts[0])
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def computed(sign: ast.operator, left: np.ndarray | float, right: np.ndarray | float) -> np.ndarray | float:
    """`left sign right` of float64; NaN where it cannot be computed, as a division by 0, whatever numpy says."""
    with np.errstate(all="ignore"):
        if isinstance(sign, DIVISIONS):
            return _DIVIDED[type(sign)](left, np.where(np.equal(right, 0), np.nan, right))
        return _COMPUTED[type(sign)](left, right)


def constant(node: ast.expr) -> float | None:
    """The number that a value without fields comes to; None for one with fields."""
    match node:
        case ast.Constant(int() | float() as value):
            return float(value)
        case ast.UnaryOp(ast.USub(), inner):
            negated = constant(inner)
            return None if negated is None else -negated
        case ast.BinOp(left, sign, right):
            first, second = constant(left), constant(right)
            return None if first is None or second is None else float(computed(sign, first, second))
    return None
