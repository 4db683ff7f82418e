"""A filter's tree worked out over the columns of an index, a stretch of samples at a time.

Numbers are float64 with NaN for "there is none"; a condition is two masks, where it holds and where its opposite holds,
and neither where it cannot be said.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from daguerre.data.filters import expression as tree
from daguerre.data.filters.expression import Condition, Use, Value
from daguerre.data.index.index import Index

CHUNK_SAMPLES = 1 << 16
"""Samples worked on at a time: what a stretch needs stays in a core's cache."""

_COMPARED: dict[str, Callable] = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal}
_COMPARED |= {"==": np.equal, "!=": np.not_equal}
_TEXT_COMPARED: dict[str, Callable] = {"<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}
_TEXT_COMPARED |= {"==": pc.equal, "!=": pc.not_equal}
_COMPUTED: dict[str, Callable] = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}
_COMPUTED |= {"//": np.floor_divide, "%": np.mod}
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


@dataclass(frozen=True)
class Verdict:
    """What a filter says of N samples."""

    passes: np.ndarray
    """[N] bool."""
    rejected: dict[str, int]
    """{reason: samples}; each sample that does not pass is counted once, under the first clause that it fails."""


def verdict(condition: Condition | None, index: Index) -> Verdict:
    """Which samples of the index pass."""
    passes = np.ones(index.count, bool)
    rejected: dict[str, int] = {}
    if condition is None:
        return Verdict(passes, rejected)
    index = _with_columns(index, {use.name for use in tree.uses(condition)})
    asked = frozenset(use.name for use in tree.uses(condition) if use.kind == "missing")
    for start in range(0, index.count, CHUNK_SAMPLES):
        rows = _Rows(index, start, min(CHUNK_SAMPLES, index.count - start))
        with np.errstate(all="ignore"):
            passes[start : start + rows.count] = _passes(condition, rows, asked, rejected)
    return Verdict(passes, rejected)


def _with_columns(index: Index, names: Set[str]) -> Index:
    """The index with these columns alone, put together once."""
    numbers, texts = (
        {name: columns[name] for name in names if name in columns} for columns in (index.numbers, index.texts)
    )
    return replace(index, numbers=numbers, texts=texts)


def _passes(condition: Condition, rows: _Rows, asked: frozenset[str], rejected: dict[str, int]) -> np.ndarray:
    """[count] bool of one stretch; reasons are added to `rejected`."""
    left = np.ones(rows.count, bool)
    for clause in tree.clauses(condition):
        holds, fails = rows.condition(clause)
        used = dict.fromkeys(tree.uses(clause))
        for use in used:
            holds = holds & rows.usable(use, asked)
        if (failed := left & ~holds).any():
            _count(clause, rows, asked, failed, fails, rejected)
            left &= holds
    return left


def _count(
    clause: Condition,
    rows: _Rows,
    asked: frozenset[str],
    failed: np.ndarray,
    fails: np.ndarray,
    rejected: dict[str, int],
) -> None:
    """Shares the samples that fail a clause out to reasons, the first that fits each."""
    used = [use for use in dict.fromkeys(tree.uses(clause)) if use.kind != "missing"]
    reasons = [(f"filter: no {use.name}", ~rows.present(use.name)) for use in used if use.name not in asked]
    reasons += [
        (f"filter: {use.name} is {_WRONG_KIND[use.kind]} {use.beside}".rstrip(), rows.wrong(use)) for use in used
    ]
    reasons.append((f"filter: {tree.canonical(clause)}", fails))
    reasons += [(f"filter: no {use.name}", ~rows.present(use.name)) for use in used if use.name in asked]
    reasons.append((f"filter: cannot be computed: {tree.canonical(clause)}", failed))
    for reason, mask in reasons:
        if number := int(np.count_nonzero(failed & mask)):
            rejected[reason] = rejected.get(reason, 0) + number
            failed = failed & ~mask


_WRONG_KIND = {"number": "not a number", "text": "not text", "flag": "not true or false", "any": "not of the kind of"}
Masks = tuple[np.ndarray, np.ndarray]
"""Where a condition holds and where its opposite does, [count] bool each."""


@dataclass(frozen=True)
class _Rows:
    """A stretch of an index; columns are cut out when they are needed, and kept."""

    index: Index
    start: int
    count: int
    cut: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)

    def kept(self, kind: str, name: str, make: Callable[[str], np.ndarray]) -> np.ndarray:
        if (kind, name) not in self.cut:
            self.cut[kind, name] = make(name)
        return self.cut[kind, name]

    def numbers(self, name: str) -> np.ndarray:
        """float64 [count], NaN where the field is missing or no number."""
        return self.kept("numbers", name, self._numbers)

    def _numbers(self, name: str) -> np.ndarray:
        if name in self.index.numbers:
            return self._slice(self.index.numbers[name]).to_numpy(zero_copy_only=False)
        if name in self.index.texts or name not in _OF_PICTURE:
            return np.full(self.count, np.nan)
        part = slice(self.start, self.start + self.count)
        sizes = [np.where(px > 0, px, np.nan) for px in (self.index.heights_px[part], self.index.widths_px[part])]
        return _OF_PICTURE[name](*sizes)

    def texts(self, name: str) -> pa.Array:
        """string or large_string [count], null where the field is missing or no text."""
        column = self.index.texts.get(name)
        return pa.nulls(self.count, pa.string()) if column is None else self._slice(column)

    def _slice(self, column: pa.Array) -> pa.Array:
        part = column.slice(self.start, self.count)
        return part.combine_chunks() if isinstance(part, pa.ChunkedArray) else part

    def is_number(self, name: str) -> np.ndarray:
        return self.kept("is number", name, lambda name: ~np.isnan(self.numbers(name)))

    def is_text(self, name: str) -> np.ndarray:
        return self.kept("is text", name, lambda name: _bools(self.texts(name).is_valid()))

    def present(self, name: str) -> np.ndarray:
        """Where the field is there."""
        return self.kept("present", name, lambda name: self.is_number(name) | self.is_text(name))

    def fits(self, use: Use) -> np.ndarray:
        """Where the field is what its place wants."""
        if use.kind == "missing":
            return np.ones(self.count, bool)
        if use.kind == "any":
            return (self.is_number(use.name) & self.is_number(use.beside)) | (
                self.is_text(use.name) & self.is_text(use.beside)
            )
        if use.kind == "flag":
            return (self.numbers(use.name) == 0) | (self.numbers(use.name) == 1)
        return self.is_number(use.name) if use.kind == "number" else self.is_text(use.name)

    def wrong(self, use: Use) -> np.ndarray:
        """Where the field is there, but not what its place wants."""
        there = self.present(use.name)
        return (there & self.present(use.beside) if use.kind == "any" else there) & ~self.fits(use)

    def usable(self, use: Use, asked: frozenset[str]) -> np.ndarray:
        """Where nothing is wrong with the field; that it is missing is, unless the filter asks that."""
        if use.kind == "any":
            return ~self.wrong(use) & (self.present(use.name) | (use.name in asked))
        return ~self.wrong(use) if use.name in asked else self.fits(use)

    def value(self, node: Value) -> np.ndarray | float:
        """Numbers [count], or one for all."""
        match node:
            case tree.Number(value) | tree.Truth(value):
                return float(value)
            case tree.Field(name):
                return self.numbers(name)
            case tree.Negative(inner):
                return -self.value(inner)
            case tree.Arithmetic(sign, left, right):
                return _arithmetic(sign, self.value(left), self.value(right))
        raise AssertionError(node)

    def condition(self, node: Condition) -> Masks:
        """Where it holds and where its opposite holds."""
        match node:
            case tree.Missing(name):
                there = self.present(name)
                return ~there, there
            case tree.Flag(name):
                return self.numbers(name) == 1, self.numbers(name) == 0
            case tree.Not(inner):
                holds, fails = self.condition(inner)
                return fails, holds
            case tree.Every(parts):
                masks = [self.condition(part) for part in parts]
                return np.logical_and.reduce([m[0] for m in masks]), np.logical_or.reduce([m[1] for m in masks])
            case tree.Either(parts):
                masks = [self.condition(part) for part in parts]
                return np.logical_or.reduce([m[0] for m in masks]), np.logical_and.reduce([m[1] for m in masks])
            case tree.Among(operand, members, negated):
                holds, fails = self.among(operand, members)
                return (fails, holds) if negated else (holds, fails)
            case tree.Compare(sign, left, right):
                return self.compare(sign, left, right)

    def compare(self, sign: str, left: Value, right: Value) -> Masks:
        if isinstance(left, tree.Text):
            left, right, sign = right, left, _FLIPPED[sign]
        if isinstance(right, tree.Text):
            assert isinstance(left, tree.Field)
            return _text_masks(_TEXT_COMPARED[sign](self.texts(left.name), right.value))
        numbers = self.compare_numbers(sign, self.value(left), self.value(right))
        if isinstance(left, tree.Field) and isinstance(right, tree.Field):
            texts = _text_masks(_TEXT_COMPARED[sign](self.texts(left.name), self.texts(right.name)))
            return numbers[0] | texts[0], numbers[1] | texts[1]
        return numbers

    def compare_numbers(self, sign: str, left: np.ndarray | float, right: np.ndarray | float) -> Masks:
        known = ~(np.isnan(left) | np.isnan(right))
        holds = _COMPARED[sign](left, right) & known
        return holds, known & ~holds

    def among(self, operand: Value, members: tuple[Value, ...]) -> Masks:
        given = [member.value for member in members if isinstance(member, tree.Number | tree.Text)]
        if isinstance(members[0], tree.Text):
            assert isinstance(operand, tree.Field)
            texts = self.texts(operand.name)
            holds = _bools(pc.is_in(texts, pa.array(given, pa.string())))
            return holds, _bools(texts.is_valid()) & ~holds
        numbers = np.asarray(self.value(operand))
        holds = np.isin(numbers, np.array(given))
        return holds, ~np.isnan(numbers) & ~holds


_OF_PICTURE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "height": lambda heights_px, widths_px: heights_px,
    "width": lambda heights_px, widths_px: widths_px,
    "aspect": lambda heights_px, widths_px: widths_px / heights_px,
}
"""Fields that every sample has whose picture's size is known, unless the metadata has its own."""


def _arithmetic(sign: str, left: np.ndarray | float, right: np.ndarray | float) -> np.ndarray | float:
    """NaN where it cannot be computed: a division by 0 is no number, whatever numpy says."""
    if sign in ("/", "//", "%"):
        right = np.where(np.equal(right, 0), np.nan, right)
    return _COMPUTED[sign](left, right)


def _bools(column: pa.Array) -> np.ndarray:
    return column.to_numpy(zero_copy_only=False)


def _text_masks(compared: pa.Array) -> Masks:
    holds = _bools(pc.fill_null(compared, False))
    return holds, _bools(compared.is_valid()) & ~holds
