"""Verdicts over columns against plain Python, sample by sample, for whatever expression and metadata."""

import ast
import math
import operator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daguerre.data.filters import evaluate
from daguerre.data.filters.evaluate import verdict
from daguerre.data.filters.expression import canonical, field, field_of, is_text, joined, number, truth
from daguerre.data.filters.parser import expression
from daguerre.data.index.index import Index

FIELDS = ("a", "b", "t", "width")
NUMBERS = st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0, 3.0, -7.25, 1e308, 5e-324, 1e-9, 512.0]) | st.floats(-1e3, 1e3)
TEXTS = st.sampled_from(["", "en", "de", "1", "é", "z'\\", "\n", "\x1b", "\u202e\U000e0001"])
STORED = st.none() | NUMBERS | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.0]) | TEXTS
ROWS = st.lists(st.fixed_dictionaries(dict.fromkeys(FIELDS, STORED)), min_size=1, max_size=25)

COMPARE = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
COMPARE |= {ast.Eq: operator.eq, ast.NotEq: operator.ne}
COMPUTE = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
COMPUTE |= {ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}


def compared(sign, left, right):
    return ast.Compare(left, [sign()], [right])


def among(sign, operand, members):
    return ast.Compare(operand, [sign()], [ast.List(members)])


NAMED = st.sampled_from(FIELDS).map(field)
NUMBER = NUMBERS.map(number)
TEXT = TEXTS.map(ast.Constant)
VALUES = st.recursive(
    NAMED | NUMBERS.map(abs).map(number),
    lambda inner: (
        st.builds(lambda sign, left, right: ast.BinOp(left, sign(), right), st.sampled_from([*COMPUTE]), inner, inner)
        | inner.map(lambda value: ast.UnaryOp(ast.USub(), value))
    ),
    max_leaves=4,
)
SIGNS = st.sampled_from([*COMPARE])
IN = st.sampled_from([ast.In, ast.NotIn])
SIMPLE = (
    st.builds(compared, SIGNS, VALUES, VALUES)
    | st.builds(compared, SIGNS, NAMED, TEXT)
    | st.builds(compared, SIGNS, TEXT, NAMED)
    | st.builds(compared, SIGNS, NAMED, NAMED)
    | st.builds(compared, st.sampled_from([ast.Eq, ast.NotEq]), NAMED, st.booleans().map(truth))
    | st.builds(among, IN, VALUES, st.lists(NUMBER, min_size=1, max_size=3))
    | st.builds(among, IN, NAMED, st.lists(TEXT, min_size=1, max_size=3))
    | NAMED.map(lambda name: ast.Call(ast.Name("missing"), [name], []))
    | NAMED
)
PAIRS = {"min_size": 2, "max_size": 3}
TREES = st.recursive(
    SIMPLE,
    lambda inner: (
        inner.map(lambda condition: ast.UnaryOp(ast.Not(), condition))
        | st.builds(joined, st.builds(ast.And) | st.builds(ast.Or), st.lists(inner, **PAIRS))
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


CASES = (TREES, ROWS, st.sampled_from([1, 3, 1 << 16]))


@settings(max_examples=120, deadline=None)
@given(*CASES)
def test_verdicts_are_those_of_plain_python(tree, rows, chunk):
    check(tree, rows, chunk)


@pytest.mark.long
@settings(max_examples=3000, deadline=None)
@given(*CASES)
def test_many_verdicts_are_those_of_plain_python(tree, rows, chunk):
    check(tree, rows, chunk)


def check(tree, rows, chunk):
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
    for clause in tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]:
        places = [place for place in used(clause) if place[1] != "missing"]
        for name, _, _ in places:
            if row[name] is None and name not in asked:
                return f"filter: no {name}"
        for name, kind, beside in places:
            if row[name] is not None and not fits(row, name, kind, beside):
                return f"filter: {name} is {WRONG[kind]} {beside}".rstrip()
        found = holds(clause, row)
        if found is None:
            absent = [name for name, _, _ in places if row[name] is None]
            return f"filter: no {absent[0]}" if absent else f"filter: cannot be computed: {canonical(clause)}"
        if not found:
            return f"filter: {canonical(clause)}"
    return None


WRONG = {"number": "not a number", "text": "not text", "flag": "not true or false", "any": "not of the kind of"}


def used(node, condition=True):
    """(field, what it must be, the field beside it) from left to right."""
    match node:
        case ast.Call(_, [inner]):
            return [(field_of(inner), "missing", "")]
        case ast.Name() if field_of(node) is not None:
            return [(field_of(node), "flag" if condition else "number", "")]
        case ast.Compare(ast.Name() as left, _, [ast.Name() as right]) if field_of(left) and field_of(right):
            names = field_of(left), field_of(right)
            return [(names[0], "any", names[1]), (names[1], "any", names[0])]
        case ast.Compare(left, _, [right]) if is_text(left) or is_text(right):
            return [(field_of(side), "text", "") for side in (left, right) if field_of(side)]
        case ast.Compare(left, _, [right]) | ast.BinOp(left, _, right):
            return used(left, False) + used(right, False)
        case ast.UnaryOp(sign, inner):
            return used(inner, isinstance(sign, ast.Not))
        case ast.BoolOp(_, parts):
            return [place for part in parts for place in used(part)]
    return []


def fits(row, name, kind, beside):
    if kind == "any":
        return row[beside] is None or type(row[name]) is type(row[beside])
    if kind == "flag":
        return row[name] in (0.0, 1.0)
    return isinstance(row[name], float if kind == "number" else str)


def computed(node, row):
    """A Python float or text; None where there is none."""
    match node:
        case ast.Constant(str() as value):
            return value
        case ast.Constant(value):
            return float(value)
        case ast.Name(("true" | "false") as word):
            return float(word == "true")
        case ast.Name():
            return row[field_of(node)]
        case ast.UnaryOp(_, operand):
            inner = computed(operand, row)
            return None if inner is None or isinstance(inner, str) else -inner
    sides = computed(node.left, row), computed(node.right, row)
    if any(side is None or isinstance(side, str) for side in sides):
        return None
    try:
        result = COMPUTE[type(node.op)](*sides)
    except ZeroDivisionError:
        return None
    return None if result != result else result


def holds(node, row):
    """True, False, or None where it cannot be said (Kleene 1952)."""
    match node:
        case ast.Call(_, [inner]):
            return row[field_of(inner)] is None
        case ast.Name():
            return {0.0: False, 1.0: True}.get(row[field_of(node)])
        case ast.UnaryOp(_, inner):
            found = holds(inner, row)
            return None if found is None else not found
        case ast.BoolOp(sign, parts):
            found, decides = [holds(part, row) for part in parts], isinstance(sign, ast.Or)
            return decides if decides in found else None if None in found else not decides
        case ast.Compare(left, [ast.In() | ast.NotIn() as sign], [ast.List(elements)]):
            operand, members = computed(left, row), [member.value for member in elements]
            if operand is None or isinstance(operand, str) != isinstance(members[0], str):
                return None
            return (operand in members) == isinstance(sign, ast.In)
    sides = computed(node.left, row), computed(node.comparators[0], row)
    return None if None in sides or type(sides[0]) is not type(sides[1]) else COMPARE[type(node.ops[0])](*sides)
