"""A filter's tree worked out over the columns of an index, a stretch of samples at a time.

Numbers are float64 with NaN for a missing one; a condition is two masks, where it holds and where its opposite holds,
and neither where it cannot be said (Kleene 1952).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from daguerre.data.filters import expression as tree
from daguerre.data.filters.expression import Use
from daguerre.data.index.index import Index

CHUNK_SAMPLES = 1 << 16
"""Samples worked on at a time: what a stretch needs stays in a core's cache."""

_COMPARED: dict[type, tuple[Callable, Callable]] = {
    # sign: of numbers and of texts
    ast.Lt: (np.less, pc.less),
    ast.LtE: (np.less_equal, pc.less_equal),
    ast.Gt: (np.greater, pc.greater),
    ast.GtE: (np.greater_equal, pc.greater_equal),
    ast.Eq: (np.equal, pc.equal),
    ast.NotEq: (np.not_equal, pc.not_equal),
}
_OF_IMAGE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "height": lambda heights_px, widths_px: heights_px,
    "width": lambda heights_px, widths_px: widths_px,
    "aspect": lambda heights_px, widths_px: widths_px / heights_px,
}
"""Fields that every sample has whose image's size is known, unless the metadata has its own."""
_WRONG_KIND = {"number": "not a number", "text": "not text", "flag": "not true or false", "any": "not of the kind of"}
Masks = tuple[np.ndarray, np.ndarray]
"""Where a condition holds and where its opposite does, [count] bool each."""


@dataclass(frozen=True)
class FilterResult:
    """The samples of an index that pass a filter, and reasons for the others."""

    passes: np.ndarray
    """[N] bool."""
    rejected: dict[str, int]
    """{reason: samples}; each sample that does not pass is counted once, under the first clause that it fails."""


def verdict(condition: ast.expr | None, index: Index) -> FilterResult:
    """Works a condition out for all samples of an index; without one, all pass."""
    passes = np.ones(index.count, bool)
    rejected: dict[str, int] = {}
    if condition is None:
        return FilterResult(passes, rejected)
    used = set(tree.uses(condition))
    numbers, texts = (  # each put together once
        {use.name: columns[use.name] for use in used if use.name in columns} for columns in (index.numbers, index.texts)
    )
    asked = frozenset(use.name for use in used if use.kind == "missing")
    for start in range(0, index.count, CHUNK_SAMPLES):
        part = slice(start, min(start + CHUNK_SAMPLES, index.count))
        sizes_px = index.heights_px[part], index.widths_px[part]
        rows = _rows({use.name for use in used}, asked, part, numbers, texts, sizes_px)
        passes[part] = rows.passes(condition, rejected)
    return FilterResult(passes, rejected)


def _rows(
    names: set[str],
    asked: frozenset[str],
    part: slice,
    numbers: Mapping[str, pa.Array],
    texts: Mapping[str, pa.Array],
    sizes_px: Masks,
) -> _Rows:
    count = part.stop - part.start
    found = {name: _cut(column, part).to_numpy(zero_copy_only=False) for name, column in numbers.items()}
    for name in names - found.keys():
        if name in _OF_IMAGE and name not in texts:
            found[name] = _OF_IMAGE[name](*(np.where(px > 0, px, np.nan) for px in sizes_px))
        else:
            found[name] = np.full(count, np.nan)
    words = {name: _cut(texts[name], part) if name in texts else pa.nulls(count, pa.string()) for name in names}
    is_number = {name: ~np.isnan(column) for name, column in found.items()}
    is_text = {name: _bools(column.is_valid()) for name, column in words.items()}
    return _Rows(count, asked, found, words, is_number, is_text)


def _cut(column: pa.Array, part: slice) -> pa.Array:
    column = column.slice(part.start, part.stop - part.start)
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _bools(column: pa.Array) -> np.ndarray:
    return column.to_numpy(zero_copy_only=False)


@dataclass(frozen=True)
class _Rows:
    """A stretch of an index: the fields that an expression uses, by name."""

    count: int
    asked: frozenset[str]
    """Fields of which the expression asks whether they are missing."""
    numbers: Mapping[str, np.ndarray]
    """float64 [count], NaN where the field is missing or no number."""
    texts: Mapping[str, pa.Array]
    """string or large_string [count], null where the field is missing or no text."""
    is_number: Mapping[str, np.ndarray]
    is_text: Mapping[str, np.ndarray]

    def passes(self, condition: ast.expr, rejected: dict[str, int]) -> np.ndarray:
        """[count] bool; reasons are added to `rejected`."""
        left = np.ones(self.count, bool)
        for clause in tree.clauses(condition):
            holds, fails = self.condition(clause)
            uses = dict.fromkeys(tree.uses(clause))
            for use in uses:  # a field that is missing rejects, unless the filter asks that
                holds = holds & ~self.wrong(use)
                if use.name not in self.asked:
                    holds = holds & self.present(use.name)
            if (failed := left & ~holds).any():
                self.share_out(clause, [use for use in uses if use.kind != "missing"], failed, fails, rejected)
                left &= holds
        return left

    def share_out(
        self, clause: ast.expr, uses: list[Use], failed: np.ndarray, fails: np.ndarray, rejected: dict[str, int]
    ) -> None:
        """Shares the samples that fail a clause out to reasons, the first that fits each."""
        absent = [(use.name, f"filter: no {use.name}", ~self.present(use.name)) for use in uses]
        reasons = [(reason, mask) for name, reason, mask in absent if name not in self.asked]
        reasons += [(f"filter: {u.name} is {_WRONG_KIND[u.kind]} {u.beside}".rstrip(), self.wrong(u)) for u in uses]
        reasons.append((f"filter: {tree.canonical(clause)}", fails))
        reasons += [(reason, mask) for name, reason, mask in absent if name in self.asked]
        reasons.append((f"filter: cannot be computed: {tree.canonical(clause)}", failed))
        for reason, mask in reasons:
            if number := int(np.count_nonzero(failed & mask)):
                rejected[reason] = rejected.get(reason, 0) + number
                failed = failed & ~mask

    def present(self, name: str) -> np.ndarray:
        """[count] bool: the field is there."""
        return self.is_number[name] | self.is_text[name]

    def wrong(self, use: Use) -> np.ndarray:
        """[count] bool: the field is there, but not what its place wants."""
        there = self.present(use.name)
        match use.kind:
            case "number":
                return there & ~self.is_number[use.name]
            case "text":
                return there & ~self.is_text[use.name]
            case "flag":
                return there & (self.numbers[use.name] != 0) & (self.numbers[use.name] != 1)
            case "any":
                numbers = self.is_number[use.name] & self.is_number[use.beside]
                texts = self.is_text[use.name] & self.is_text[use.beside]
                return there & self.present(use.beside) & ~(numbers | texts)
        return np.zeros(self.count, bool)

    def condition(self, node: ast.expr) -> Masks:
        """The masks of a condition."""
        match node:
            case ast.BoolOp(sign, parts):
                masks = [self.condition(part) for part in parts]
                every, some = np.logical_and.reduce, np.logical_or.reduce
                of_holds, of_fails = (every, some) if isinstance(sign, ast.And) else (some, every)
                return of_holds([mask[0] for mask in masks]), of_fails([mask[1] for mask in masks])
            case ast.UnaryOp(_, inner):
                holds, fails = self.condition(inner)
                return fails, holds
            case ast.Call(_, [inner]):
                there = self.present(_name(inner))
                return ~there, there
            case ast.Compare(left, [ast.In() | ast.NotIn() as sign], [ast.List(members)]):
                holds, fails = self.among(left, members)
                return (holds, fails) if isinstance(sign, ast.In) else (fails, holds)
            case ast.Compare(left, [sign], [right]):
                return self.compare(sign, left, right)
        numbers = self.numbers[_name(node)]
        return numbers == 1, numbers == 0

    def compare(self, sign: ast.cmpop, left: ast.expr, right: ast.expr) -> Masks:
        of_numbers, of_texts = _COMPARED[type(sign)]
        if tree.is_text(left) or tree.is_text(right):
            return _masks(of_texts(self.words(left), self.words(right)))
        first, second = self.value(left), self.value(right)
        known = ~(np.isnan(first) | np.isnan(second))
        holds = of_numbers(first, second) & known
        if tree.field_of(left) is None or tree.field_of(right) is None:
            return holds, known & ~holds
        texts = _masks(of_texts(self.words(left), self.words(right)))
        return holds | texts[0], (known & ~holds) | texts[1]

    def among(self, operand: ast.expr, members: list[ast.expr]) -> Masks:
        given = [member.value for member in members if isinstance(member, ast.Constant)]
        if tree.is_text(members[0]):
            name = _name(operand)
            holds = _bools(pc.is_in(self.texts[name], pa.array(given, pa.string())))
            return holds, self.is_text[name] & ~holds
        numbers = np.asarray(self.value(operand))
        holds = np.isin(numbers, np.array(given, np.float64))
        return holds, ~np.isnan(numbers) & ~holds

    def words(self, node: ast.expr) -> pa.Array | pa.Scalar:
        """Texts [count], or one for all."""
        return pa.scalar(node.value) if isinstance(node, ast.Constant) else self.texts[_name(node)]

    def value(self, node: ast.expr) -> np.ndarray | float:
        """Numbers [count], or one for all."""
        match node:
            case ast.Constant(int() | float() as value):
                return float(value)
            case ast.Name(("true" | "false") as word):
                return float(word == "true")
            case ast.UnaryOp(_, inner):
                return -self.value(inner)
            case ast.BinOp(left, sign, right):
                return tree.computed(sign, self.value(left), self.value(right))
        return self.numbers[_name(node)]


def _name(node: ast.expr) -> str:
    name = tree.field_of(node)
    assert name is not None, ast.dump(node)
    return name


def _masks(compared: pa.Array) -> Masks:
    holds = _bools(pc.fill_null(compared, False))
    return holds, _bools(compared.is_valid()) & ~holds
