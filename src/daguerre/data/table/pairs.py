"""The rows of a table of pairs: two images, and a column that says which of them people prefer. No torch here."""

import math
from collections.abc import Mapping
from typing import Any

from daguerre.data.table.images import Lacking

PICK_A_PIC = ("jpg_0", "jpg_1", "label_0")
"""The columns of Pick-a-Pic (Kirstain et al. 2023, arXiv 2305.01569): two images, and which one people prefer."""
TIE = "tie: people prefer neither image of the pair"
_TIE = 0.5


def preferred(row: Mapping[str, Any], first: str, second: str, preference: str) -> dict[str, Any]:
    """The row with the image that people prefer in the column `first`, and the other one in `second`. `Lacking` for a
    tie, and where `preference` is not one of 1 (the first), 0 (the second) and 0.5 (a tie)."""
    value = _number(row.get(preference))
    if value == _TIE:
        raise Lacking(TIE)
    if value not in (0, 1):
        raise Lacking(f"no preference (column {preference!r}): it is 1 for the first image, 0 for the second")
    return dict(row) if value else {**row, first: row.get(second), second: row.get(first)}


def _number(value: Any) -> float:
    """A cell as a number; not a number where it holds none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
