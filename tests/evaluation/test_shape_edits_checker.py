"""The checker of edited images: what was named must have changed, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from daguerre.data.sources import shape_edits as source
from daguerre.data.sources.shapes import COLOURS, render
from daguerre.evaluation.metric import DrawnInputs
from daguerre.evaluation.metrics import shape_edits

COUNT = 45
PAIRS = [source.pair("held_out", (1 << 62) + number) for number in range(COUNT)]
Drawn = Callable[[source.Pair], np.ndarray]


def other_background(one: source.Pair) -> np.ndarray:
    free = next(name for name in COLOURS if name not in (one.edit.after.colour, one.edit.after.background))
    return render(replace(one.edit.after, background=free))


CASES: dict[str, tuple[Drawn, float, float]] = {
    "as asked": (lambda one: one.image, 1.0, 1.0),
    "moved and as asked": (lambda one: render(one.edit.after, (3.0, -2.0)), 1.0, 1.0),
    "unchanged": (lambda one: one.reference, 0.0, 1.0),
    "on another background": (other_background, 1.0, 0.0),
    "noise": (lambda one: np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8), 0.0, 0.0),
}


@pytest.mark.parametrize("case", CASES)
def test_shares_are_of_what_was_named_and_of_what_was_not(case: str) -> None:
    drawn, edited, kept = CASES[case]
    table = shape_edits.shares([one.edit for one in PAIRS], [drawn(one) for one in PAIRS])
    assert (table["edited"], table["kept"]) == (edited, kept)
    assert table["all"] == (1.0 if edited == kept == 1.0 else 0.0)
    assert {table[name] for name in source.EDITED} == {edited}


def test_the_metric_draws_held_out_pairs_and_marks_them() -> None:
    asked: list[tuple[str, bytes]] = []

    def draw(texts: Sequence[str], references: Sequence[np.ndarray] = ()) -> list[np.ndarray]:
        asked.extend(zip(texts, [one.tobytes() for one in references], strict=True))
        return [PAIRS[i].image if i % 3 else PAIRS[i].reference for i in range(len(texts))]

    settings = source.Settings(checked_pairs=COUNT, marks={"edited": 0.5, "kept": None})
    (result,) = shape_edits.evaluate(shape_edits.Settings(), DrawnInputs(settings, draw)).values()
    assert asked == [(one.text, one.reference.tobytes()) for one in PAIRS]
    rows = {row.name: row for row in result.rows}
    assert rows["edited"].value == pytest.approx(2 / 3)
    assert (rows["edited"].must, rows["kept"].must, rows["all"].must) == (0.5, None, None)
