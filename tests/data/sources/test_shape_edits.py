"""The `shape_edits` source: its pairs differ in one attribute, and training never sees what held-out ones lead to."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
from pydantic import ValidationError

from daguerre.data.sources import shape_edits, shapes
from daguerre.evaluation.metrics.shapes import check


def test_one_attribute_changes_and_a_size_by_one_step() -> None:
    radii = [*shapes.RADII_PX]
    for split in ("train", "held_out"):
        for attribute, options in shape_edits.edits(split).items():
            assert len(options) == len(set(options)) > 30
            for one in options:
                changed = [k for k, value in asdict(one.before).items() if value != getattr(one.after, k)]
                assert changed == [attribute] == [one.attribute]
                assert one.before.colour != one.before.background
                if attribute == "size":
                    assert abs(radii.index(one.before.size) - radii.index(one.after.size)) == 1


def test_training_never_shows_what_a_held_out_edit_leads_to() -> None:
    trained = [one for options in shape_edits.edits("train").values() for one in options]
    shown = {one.before for one in trained} | {one.after for one in trained}
    asked = [one for options in shape_edits.edits("held_out").values() for one in options]
    assert shown.isdisjoint(one.after for one in asked)
    assert {one.after for one in asked} == {*shapes.combinations("held_out")}
    assert {one.before for one in asked} & shown, "most of them start from what was seen"


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_pair_shows_what_it_says_at_one_place(split: shapes.Split) -> None:
    source = shape_edits.open_source(shape_edits.Settings(), split)
    seen = Counter[str]()
    for number in range(30):
        record, made = source.record(number), shape_edits.pair(split, source.sample_id(number))
        before, after = (np.asarray(record.images[name]) for name in ("reference", "image"))
        assert asdict(check(before)) == asdict(made.edit.before)
        assert (
            asdict(check(after)) == asdict(made.edit.after) == {k: record.metadata[k] for k in asdict(made.edit.after)}
        )
        attribute = record.metadata["edited"]
        seen[attribute] += 1
        value = getattr(made.edit.after, attribute)
        assert value in record.texts["text"] or record.texts["text"] in ("make it larger", "make it smaller")
        if attribute == "colour":
            outlines = [(image != image[0, 0]).any(-1) for image in (before, after)]
            assert np.not_equal(*outlines).mean() < 0.01, "the same outline, but for pixels that are hardly covered"
    assert min(seen[attribute] for attribute in shape_edits.EDITED) >= 4


def test_sizes_are_said_by_their_direction() -> None:
    each = {one.instruction(0.5): one for one in shape_edits.edits("train")["size"]}
    assert each.keys() == {"make it larger", "make it smaller"}
    larger = each["make it larger"]
    assert shapes.RADII_PX[larger.after.size] > shapes.RADII_PX[larger.before.size]


def test_its_words_are_those_of_its_captions() -> None:
    source, known = shape_edits.open_source(shape_edits.Settings(), "held_out"), shape_edits.Settings().words()
    texts = [source.record(number).texts["text"] for number in range(100)]
    assert {word for text in texts for word in text.split()} <= known


def test_what_cannot_act_is_refused() -> None:
    for given in ({"resolution": 128}, {"marks": {"background": 0.9}}, {"marks": {"kept": 1.5}}):
        with pytest.raises(ValidationError):
            shape_edits.Settings.model_validate(given)
    assert "random_flip" in shape_edits.Settings().unused()
    assert "marks" in shape_edits.Settings(checked_pairs=0).unused()
