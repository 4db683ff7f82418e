"""What a filter expression is once it was read: a tree of frozen nodes, its canonical text, and which fields it uses.

A tree is made by `filter_grammar`, which refuses what means nothing; it is worked out over columns by `filter_columns`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

TEXT_CHARACTERS = 63
"""Longest text in an expression: fields with longer texts are not kept in indexes, so none could be equal."""
BARE_NAME = re.compile(r"[^\W\d]\w*")
"""Field names that are written as they are; all others stand in backticks."""
WORDS = frozenset({"and", "or", "not", "in", "missing", "true", "false", "True", "False", "lambda", "is", "if", "else"})
WORDS |= {"null", "None"}
"""Words with a meaning of their own: a field of such a name stands in backticks."""


@dataclass(frozen=True)
class Number:
    """A finite number."""

    value: float


@dataclass(frozen=True)
class Text:
    """A text of at most `TEXT_CHARACTERS`."""

    value: str


@dataclass(frozen=True)
class Truth:
    """`true` or `false`: 1 or 0 in an index."""

    value: bool


@dataclass(frozen=True)
class Field:
    """A field of the metadata, or of the picture's size."""

    name: str


@dataclass(frozen=True)
class Negative:
    """`-operand`."""

    operand: Value


@dataclass(frozen=True)
class Arithmetic:
    """`left sign right` with a sign of + - * / // %, as Python computes with floats."""

    sign: str
    left: Value
    right: Value


Value = Number | Text | Truth | Field | Negative | Arithmetic


@dataclass(frozen=True)
class Compare:
    """`left sign right` with a sign of < <= > >= == !=."""

    sign: str
    left: Value
    right: Value


@dataclass(frozen=True)
class Among:
    """`operand in [members]`, or `not in`."""

    operand: Value
    members: tuple[Value, ...]
    negated: bool


@dataclass(frozen=True)
class Missing:
    """`missing(name)`: the sample has no such field."""

    name: str


@dataclass(frozen=True)
class Flag:
    """A field that stands alone: it is true or false itself."""

    name: str


@dataclass(frozen=True)
class Not:
    """`not condition`."""

    condition: Condition


@dataclass(frozen=True)
class Every:
    """Conditions joined by `and`; none of them is an `Every`."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True)
class Either:
    """Conditions joined by `or`; none of them is an `Either`."""

    conditions: tuple[Condition, ...]


Condition = Compare | Among | Missing | Flag | Not | Every | Either
Node = Value | Condition


def every(conditions: list[Condition]) -> Condition:
    """All of them, flat."""
    flat = tuple(c for given in conditions for c in (given.conditions if isinstance(given, Every) else (given,)))
    return flat[0] if len(flat) == 1 else Every(flat)


def either(conditions: list[Condition]) -> Condition:
    """One of them at least, flat."""
    flat = tuple(c for given in conditions for c in (given.conditions if isinstance(given, Either) else (given,)))
    return flat[0] if len(flat) == 1 else Either(flat)


def clauses(tree: Condition) -> tuple[Condition, ...]:
    """What a top-level `and` joins."""
    return tree.conditions if isinstance(tree, Every) else (tree,)


Kind = Literal["number", "text", "flag", "any", "missing"]


@dataclass(frozen=True)
class Use:
    """A field where it stands in an expression, and what it must be there: a number, a text, true or false, or (`any`)
    of the same kind as `beside`, the field that it is compared with."""

    name: str
    kind: Kind
    beside: str = ""


def uses(node: Node) -> Iterator[Use]:
    """Every place where a field stands, in the order of the text."""
    match node:
        case Missing(name):
            yield Use(name, "missing")
        case Flag(name):
            yield Use(name, "flag")
        case Field(name):
            yield Use(name, "number")
        case Compare(_, Field(left), Field(right)):
            yield Use(left, "any", right)
            yield Use(right, "any", left)
        case Compare(_, Field(name), Text()) | Compare(_, Text(), Field(name)) | Among(Field(name), (Text(), *_)):
            yield Use(name, "text")
        case Negative(inner) | Not(inner) | Among(inner):
            yield from uses(inner)
        case Arithmetic(_, left, right) | Compare(_, left, right):
            yield from uses(left)
            yield from uses(right)
        case Every(conditions) | Either(conditions):
            for condition in conditions:
                yield from uses(condition)


def constant(node: Value) -> float | None:
    """What a value without fields comes to, NaN for a division by 0; None for one with fields."""
    match node:
        case Number(value):
            return value
        case Negative(inner):
            negated = constant(inner)
            return None if negated is None else -negated
        case Arithmetic(sign, left, right):
            first, second = constant(left), constant(right)
            return None if first is None or second is None else _computed(sign, first, second)
    return None


def _computed(sign: str, left: float, right: float) -> float:
    if sign in ("+", "-"):
        return left + right if sign == "+" else left - right
    if sign == "*":
        return left * right
    if right == 0:
        return math.nan
    return left / right if sign == "/" else left // right if sign == "//" else left % right


def name_text(name: str) -> str:
    """A field's name as it stands in an expression."""
    bare = BARE_NAME.fullmatch(name) and name not in WORDS
    return name if bare else "`" + name.replace("`", "``") + "`"


_ESCAPES = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t"}
_POWER = {"or": 1, "and": 2, "not": 3, "compare": 4, "+": 5, "-": 5, "*": 6, "/": 6, "//": 6, "%": 6, "negative": 7}


def canonical(node: Node) -> str:
    """The expression that reads as this tree, with as few parentheses as there can be."""
    return _written(node)[0]


def _written(node: Node) -> tuple[str, int]:
    """Text of a node, and how strongly it holds together."""
    match node:
        case Number(value):
            return _number_text(value), 9
        case Text(value):
            return f"'{''.join(map(_character_text, value))}'", 9
        case Truth(value):
            return "true" if value else "false", 9
        case Field(name) | Flag(name):
            return name_text(name), 9
        case Missing(name):
            return f"missing({name_text(name)})", 9
        case Negative(inner):
            return f"-{_within(inner, _POWER['negative'])}", _POWER["negative"]
        case Not(inner):
            return f"not {_within(inner, _POWER['not'])}", _POWER["not"]
        case Arithmetic(sign, left, right):
            power = _POWER[sign]
            return f"{_within(left, power)} {sign} {_within(right, power + 1)}", power
        case Compare(sign, left, right):
            return f"{_within(left, 5)} {sign} {_within(right, 5)}", _POWER["compare"]
        case Among(inner, members, negated):
            listed = ", ".join(canonical(member) for member in members)
            return f"{_within(inner, 5)} {'not ' * negated}in [{listed}]", _POWER["compare"]
        case Every(conditions):
            return " and ".join(_within(condition, _POWER["not"]) for condition in conditions), _POWER["and"]
        case Either(conditions):
            return " or ".join(_within(condition, _POWER["and"]) for condition in conditions), _POWER["or"]


def _within(node: Node, power: int) -> str:
    text, own = _written(node)
    return text if own >= power else f"({text})"


def _number_text(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _character_text(character: str) -> str:
    """A character in a quoted text; what a terminal cannot show, or obeys, by its number."""
    if character in _ESCAPES or character.isprintable():
        return _ESCAPES.get(character, character)
    return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"
