"""Verdicts over columns against plain Python, sample by sample, for whatever expression and metadata."""

import math
import operator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daguerre.data.filters import evaluate
from daguerre.data.filters.evaluate import verdict
from daguerre.data.filters.expression import (
    Among,
    Arithmetic,
    Compare,
    Either,
    Every,
    Field,
    Flag,
    Missing,
    Negative,
    Not,
    Number,
    Text,
    Truth,
    canonical,
)
from daguerre.data.filters.parser import expression
from daguerre.data.index.index import Index

FIELDS = ("a", "b", "t", "width")
NUMBERS = st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0, 3.0, -7.25, 1e308, 5e-324, 1e-9, 512.0]) | st.floats(-1e3, 1e3)
TEXTS = st.sampled_from(["", "en", "de", "1", "é", "z'\\", "\n", "\x1b", "\u202e\U000e0001"])
STORED = st.none() | NUMBERS | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.0]) | TEXTS
ROWS = st.lists(st.fixed_dictionaries(dict.fromkeys(FIELDS, STORED)), min_size=1, max_size=25)

NAMED = st.sampled_from(FIELDS).map(Field)
VALUES = st.recursive(
    NAMED | NUMBERS.map(abs).map(Number),
    lambda inner: (
        st.builds(Arithmetic, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner, inner)
        | st.builds(Negative, inner)
    ),
    max_leaves=4,
)
SIGNS = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
SIMPLE = (
    st.builds(Compare, SIGNS, VALUES, VALUES)
    | st.builds(Compare, SIGNS, NAMED, TEXTS.map(Text))
    | st.builds(Compare, SIGNS, TEXTS.map(Text), NAMED)
    | st.builds(Compare, SIGNS, NAMED, NAMED)
    | st.builds(Compare, st.sampled_from(["==", "!="]), NAMED, st.booleans().map(Truth))
    | st.builds(Among, VALUES, st.lists(NUMBERS.map(Number), min_size=1, max_size=3).map(tuple), st.booleans())
    | st.builds(Among, NAMED, st.lists(TEXTS.map(Text), min_size=1, max_size=3).map(tuple), st.booleans())
    | st.sampled_from(FIELDS).map(Missing)
    | st.sampled_from(FIELDS).map(Flag)
)
PAIRS = {"min_size": 2, "max_size": 3}
TREES = st.recursive(
    SIMPLE,
    lambda inner: (
        st.builds(Not, inner)
        | st.lists(inner, **PAIRS).map(tuple).map(Every)
        | st.lists(inner, **PAIRS).map(tuple).map(Either)
    ),
    max_leaves=5,
)


def index(rows):
    def columns(kind, wanted):
        return {
            name: pa.array([row[name] if isinstance(row[name], wanted) else None for row in rows], kind)
            for name in FIELDS
            if any(isinstance(row[name], wanted) for row in rows)
        }

    sizes = np.zeros(len(rows), np.int32)
    text = pa.large_string() if len(rows) % 2 else pa.string()  # as a source of files gives it, and as others may
    numbers, texts = columns(pa.float64(), float), columns(text, str)
    return Index(np.arange(len(rows)), np.array([0, len(rows)]), sizes, sizes, numbers, texts)


@settings(max_examples=1500, deadline=None)
@given(TREES, ROWS, st.sampled_from([1, 3, 1 << 16]))
def test_verdicts_are_those_of_plain_python(tree, rows, chunk):
    try:
        tree = expression(canonical(tree))
    except ValueError:
        return  # means nothing: the grammar's tests say what
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "CHUNK_SAMPLES", chunk)
        found = verdict(tree, index(rows))
    reasons = [rejection(tree, row) for row in rows]
    assert found.passes.tolist() == [reason is None for reason in reasons]
    counts = {reason: reasons.count(reason) for reason in reasons if reason}
    assert found.rejected == counts


def rejection(tree, row):
    """Why plain Python leaves a sample out: the reason of the first clause that is not true; None if it passes."""
    row = {name: None if value != value else value for name, value in row.items()}
    asked = {name for name, kind, _ in used(tree) if kind == "missing"}
    for clause in tree.conditions if isinstance(tree, Every) else [tree]:
        places = [place for place in used(clause) if place[1] != "missing"]
        for name, _, _ in places:
            if row[name] is None and name not in asked:
                return f"filter: no {name}"
        for name, kind, beside in places:
            if row[name] is not None and not fits(row, name, kind, beside):
                return f"filter: {name} is {WRONG[kind]} {beside}".rstrip()
        holds = truth(clause, row)
        if holds is None:
            absent = [name for name, _, _ in places if row[name] is None]
            return f"filter: no {absent[0]}" if absent else f"filter: cannot be computed: {canonical(clause)}"
        if not holds:
            return f"filter: {canonical(clause)}"
    return None


WRONG = {"number": "not a number", "text": "not text", "flag": "not true or false", "any": "not of the kind of"}


def used(node):
    """(field, what it must be, the field beside it) from left to right."""
    if isinstance(node, Missing | Flag):
        return [(node.name, "missing" if isinstance(node, Missing) else "flag", "")]
    if isinstance(node, Field):
        return [(node.name, "number", "")]
    if isinstance(node, Compare) and isinstance(node.left, Field) and isinstance(node.right, Field):
        names = node.left.name, node.right.name
        return [(names[0], "any", names[1]), (names[1], "any", names[0])]
    if isinstance(node, Compare) and (isinstance(node.left, Text) or isinstance(node.right, Text)):
        return [(side.name, "text", "") for side in (node.left, node.right) if isinstance(side, Field)]
    if isinstance(node, Among) and isinstance(node.members[0], Text):
        return [(node.operand.name, "text", "")]
    inner = {Not: "condition", Negative: "operand", Among: "operand"}
    if type(node) in inner:
        return used(getattr(node, inner[type(node)]))
    if isinstance(node, Every | Either):
        return [place for part in node.conditions for place in used(part)]
    return [place for side in (node.left, node.right) for place in used(side)] if hasattr(node, "left") else []


def fits(row, name, kind, beside):
    if kind == "any":
        return row[beside] is None or type(row[name]) is type(row[beside])
    if kind == "flag":
        return row[name] in (0.0, 1.0)
    return isinstance(row[name], float if kind == "number" else str)


COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
COMPARE |= {"==": operator.eq, "!=": operator.ne}
COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
COMPUTE |= {"//": operator.floordiv, "%": operator.mod}


def number(node, row):
    """A Python float or text; None where there is none."""
    if isinstance(node, Number | Truth | Text):
        return float(node.value) if not isinstance(node, Text) else node.value
    if isinstance(node, Field):
        return row[node.name]
    if isinstance(node, Negative):
        inner = number(node.operand, row)
        return None if inner is None or isinstance(inner, str) else -inner
    sides = number(node.left, row), number(node.right, row)
    if any(side is None or isinstance(side, str) for side in sides):
        return None
    try:
        result = COMPUTE[node.sign](*sides)
    except ZeroDivisionError:
        return None
    return None if result != result else result


def truth(node, row):
    """True, False, or None where it cannot be said (Kleene 1952)."""
    if isinstance(node, Missing):
        return row[node.name] is None
    if isinstance(node, Flag):
        return {0.0: False, 1.0: True}.get(row[node.name])
    if isinstance(node, Not):
        inner = truth(node.condition, row)
        return None if inner is None else not inner
    if isinstance(node, Every):
        found = [truth(part, row) for part in node.conditions]
        return False if False in found else None if None in found else True
    if isinstance(node, Either):
        found = [truth(part, row) for part in node.conditions]
        return True if True in found else None if None in found else False
    if isinstance(node, Among):
        operand = number(node.operand, row)
        members = [member.value for member in node.members]
        return (
            None if operand is None or type(operand) is not type(members[0]) else (operand in members) != node.negated
        )
    sides = number(node.left, row), number(node.right, row)
    return None if None in sides or type(sides[0]) is not type(sides[1]) else COMPARE[node.sign](*sides)
