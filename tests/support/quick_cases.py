"""Parametrisations of which the quick suite runs a part: the rest is marked `long`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def quick_where(is_quick: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize`; a tuple is one case of several arguments."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[] if is_quick(case) else [pytest.mark.long]
        )
        for case in cases
    ]


def quick_first(cases: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize`, of which only the first is quick."""
    first, *others = cases
    return [first, *quick_where(lambda case: False, others)]
