"""Parametrisations of which the quick suite runs a part; `make test-long` runs the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def crossed(*axes: Sequence[Any]) -> list[Any]:
    """Every combination of the axes, as parameters. Quick are as many as the longest axis has values: each value of
    each axis is in one of them at least. A tuple on an axis stands for several arguments."""
    quick = {tuple(number % len(axis) for axis in axes) for number in range(max(map(len, axes)))}
    found = []
    for index in product(*(range(len(axis)) for axis in axes)):
        values = (axis[number] for axis, number in zip(axes, index, strict=True))
        each = [one for value in values for one in (value if isinstance(value, tuple) else (value,))]
        found.append(pytest.param(*each, marks=[] if index in quick else [pytest.mark.long]))
    return found


def chosen(cases: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """The cases as parameters; quick are those of which `quick`, given the arguments of one, is true."""
    found = []
    for case in cases:
        each = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*each, marks=[] if quick(*each) else [pytest.mark.long]))
    return found


def long(cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters, none of them quick: beside quicker ones of their kind."""
    return chosen(cases, lambda *each: False)


def quick_where(is_quick: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters; quick are those of which `is_quick`, given a case as it is, is true."""
    return chosen(cases, lambda *each: is_quick(each if len(each) > 1 else each[0]))


def quick_first(cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters, of which only the first is quick."""
    first, *others = cases
    return [first, *long(others)]
