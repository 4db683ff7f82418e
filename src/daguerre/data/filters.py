"""Filters as a recipe gives them, in three spellings, and what they say of the samples of an index.

    filters: original_width >= 512 and punsafe < 0.1              an expression
    filters: {pwatermark: "<=0.5", language: "== 'en'"}           what is said of each field
    filters: [[aesthetic_score, "lambda s: s > 4.5"]]             the same as pairs

The grammar is `filter_grammar`'s, the arithmetic over columns is `filter_columns`'s. Nothing here runs text.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any

from pydantic import ConfigDict, RootModel, WithJsonSchema, field_validator

from daguerre.data import filter_grammar, filter_tree
from daguerre.data.filter_columns import Verdict, verdict
from daguerre.data.filter_tree import Condition
from daguerre.data.index import Index

CONDITIONS = 1000
"""Most fields or pairs."""
_SPELLINGS = """write an expression ("original_width >= 512 and punsafe < 0.1"), a group of fields
({pwatermark: "<=0.5"}) or a list of pairs ([[aesthetic_score, "lambda s: s > 4.5"]])"""
_ABOUT = {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]}
_SCHEMA = {
    "anyOf": [
        {"type": "null"},
        {"type": "string"},
        {"type": "object", "additionalProperties": _ABOUT},
        {
            "type": "array",
            "items": {"anyOf": [{"type": "string"}, {"type": "array", "prefixItems": [{"type": "string"}, _ABOUT]}]},
        },
    ]
}


class Filters(RootModel[Annotated[Any, WithJsonSchema(_SCHEMA)]]):
    """Which samples are trained on, by their metadata; `Filters()` lets all of them pass."""

    model_config = ConfigDict(frozen=True)

    root: Annotated[Any, WithJsonSchema(_SCHEMA)] = None
    """As it was given; None for no filter."""

    @field_validator("root")
    @classmethod
    def _means_something(cls, given: Any) -> Any:
        if given is None or (isinstance(given, str) and given.strip() == "null") or given in ([], {}):
            return None
        _tree(given)
        return given

    @cached_property
    def tree(self) -> Condition | None:
        """What is asked of a sample; None for no filter."""
        return None if self.root is None else _tree(self.root)

    def __str__(self) -> str:
        return "" if self.tree is None else filter_tree.canonical(self.tree)

    def fields(self) -> frozenset[str]:
        """Names of the fields that it uses."""
        return frozenset(use.name for use in filter_tree.uses(self.tree)) if self.tree else frozenset()

    def evaluate(self, index: Index) -> Verdict:
        """Which samples pass, and how many were left out for which reason."""
        return verdict(self.tree, index)


def _tree(given: Any) -> Condition:
    if isinstance(given, str):
        tree = filter_grammar.expression(given)
    elif isinstance(given, dict):
        tree = _all_of(list(given.items()))
    elif isinstance(given, list | tuple):
        single = len(given) == 2 and all(isinstance(member, str) for member in given)
        tree = _all_of([given] if single else list(given))
    else:
        raise ValueError(_SPELLINGS)
    return tree


def _all_of(pairs: list[Any]) -> Condition:
    if len(pairs) > CONDITIONS:
        raise ValueError(f"{len(pairs):,} fields are too many: at most {CONDITIONS:,}")
    return filter_tree.every([_of_one_field(pair) for pair in pairs])


def _of_one_field(pair: Any) -> Condition:
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
        raise ValueError(f"not a pair of a field and what is said of it: {_SPELLINGS}")
    name, said = pair
    if isinstance(said, bool | int | float):
        said = f"== {str(said).lower()}"
    if not isinstance(said, str):
        raise ValueError(f"{name[:40]}: expected a comparison such as '<= 0.5', or a number")
    try:
        return filter_grammar.about(name, said)
    except ValueError as error:
        raise ValueError(f"{name[:40]}: {error}") from None
