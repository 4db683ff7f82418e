"""Filters as a recipe gives them, in three spellings, and what they say of the samples of an index.

    filters: original_width >= 512 and punsafe < 0.1              an expression
    filters: {pwatermark: "<=0.5", language: "== 'en'"}           what is said of each field
    filters: [[aesthetic_score, "lambda s: s > 4.5"]]             the same as pairs

Texts are read by `parser.py`, and worked out over columns by `evaluate.py`. Nothing here runs text.
"""

from __future__ import annotations

import ast
import math
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, RootModel, WithJsonSchema, field_validator

from daguerre.data.filters import expression, parser
from daguerre.errors import UserError

if TYPE_CHECKING:
    from daguerre.data.filters.evaluate import FilterResult
    from daguerre.data.index.index import Index

CONDITIONS = 1000
"""Most fields or pairs."""
_SPELLINGS = (
    'write an expression ("original_width >= 512 and punsafe < 0.1"),\n'
    'a group of fields ({pwatermark: "<=0.5"}) or a list of pairs ([[aesthetic_score, "lambda s: s > 4.5"]])'
)
_SAID = {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]}
_PAIR = {"type": "array", "prefixItems": [{"type": "string"}, _SAID], "minItems": 2, "maxItems": 2}
_SCHEMA = {
    "anyOf": [
        {"type": "null"},
        {"type": "string"},
        {"type": "object", "additionalProperties": _SAID},
        {"type": "array", "items": _PAIR},
        _PAIR,
    ]
}


class Filters(RootModel[Any]):
    """Chooses samples by their metadata; `Filters()` lets all of them pass."""

    model_config = ConfigDict(frozen=True)

    root: Annotated[Any, WithJsonSchema(_SCHEMA)] = None
    """As it was given; None for no filter."""

    @field_validator("root")
    @classmethod
    def _means_something(cls, given: Any) -> Any:
        if given is None or (isinstance(given, str) and given.strip() == "null"):
            return None
        if isinstance(given, dict | list | tuple) and not given:
            return None
        _tree(given)
        return given

    @cached_property
    def tree(self) -> ast.expr | None:
        """The condition; None for no filter."""
        return None if self.root is None else _tree(self.root)

    def __str__(self) -> str:
        """One expression that means the same; nothing for no filter."""
        return "" if self.tree is None else expression.canonical(self.tree)

    def clauses(self) -> tuple[Filters, ...]:
        """One filter for each of the conditions that `and` joins."""
        return () if self.tree is None else tuple(_of(clause) for clause in expression.clauses(self.tree))

    def fields(self) -> frozenset[str]:
        return frozenset(use.name for use in expression.uses(self.tree)) if self.tree else frozenset()

    def evaluate(self, index: Index) -> FilterResult:
        """Applies the filter. A field that the index lacks is missing in every sample."""
        from daguerre.data.filters.evaluate import verdict  # imports pyarrow, which no check of a recipe needs

        return verdict(self.tree, index)


def _of(tree: ast.expr) -> Filters:
    """The filter of a tree that was checked as part of another."""
    filters = Filters.model_construct(root=expression.canonical(tree))
    filters.__dict__["tree"] = tree
    return filters


def _tree(given: Any) -> ast.expr:
    if isinstance(given, str):
        return parser.whole(parser.expression(given))
    if isinstance(given, dict):
        return _all_of(list(given.items()))
    if isinstance(given, list | tuple):
        single = len(given) == 2 and isinstance(given[0], str)
        return _all_of([given] if single else list(given))
    raise UserError(_SPELLINGS)


def _all_of(pairs: list[Any]) -> ast.expr:
    if len(pairs) > CONDITIONS:
        raise UserError(f"{len(pairs):,} fields are too many: at most {CONDITIONS:,}")
    return parser.whole(expression.joined(ast.And(), [_of_one_field(pair) for pair in pairs]))


def _of_one_field(pair: Any) -> ast.expr:
    """The tree of a field and what is said of it."""
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
        raise UserError(f"a list must have pairs of a field and a condition: {_SPELLINGS}")
    name, said = pair
    shown = name[:40] if name.isprintable() else repr(name[:40])
    try:
        return parser.about(name, said if isinstance(said, str) else _equal_to(said))
    except ValueError as error:
        raise UserError(f"{shown}: {error}") from None


def _equal_to(said: Any) -> str:
    """A number, true or false stands for being equal to it."""
    if not isinstance(said, bool | int | float):
        raise UserError("expected a comparison such as '<= 0.5', or a number")
    try:
        value = float(said)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value) or value != said:
        raise UserError("this number does not fit into a float of 64 bits")
    return f"== {said if isinstance(said, bool) else value}"
