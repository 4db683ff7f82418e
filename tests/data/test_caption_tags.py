"""Tags that are left out, groups of tags, and alternatives in captions: against sd-scripts"""

import random
import re
from collections import Counter

import numpy as np
import pytest
from pydantic import ValidationError

from daguerre.data import captions
from daguerre.data.settings import SourceSettings
from daguerre.types import Record


def drawn(text, rules, count=4000, epoch=0):
    settings = SourceSettings(source="test", caption_dropout=0.0, captions=rules)
    record = Record("a", {"image": b""}, {"text": text})
    return [captions.choose(record, settings, 0, np.array([i, epoch, 0])) for i in range(count)]


def theirs(caption, seed, *, wildcards, shuffle, keep, dropout, group):
    """What sd-scripts' `process_caption` does, by Python's own random numbers."""
    rng = random.Random(seed)
    if wildcards:
        caption = re.sub(r"\{([^}]+)\}", lambda found: rng.choice(found[1].split("|")), caption)
    if shuffle or dropout:
        tags = [tag.strip() for tag in caption.strip().split(",")]
        fixed, rest = tags[:keep], tags[keep:]
        if shuffle:
            rng.shuffle(rest)
        caption = ", ".join([*fixed, *(tag for tag in rest if rng.random() >= dropout)])
    return caption.replace(group, ", ") if group else caption


@pytest.mark.parametrize(
    "given",
    [
        {"wildcards": False, "shuffle": False, "keep": 1, "dropout": 0.3, "group": None},
        {"wildcards": False, "shuffle": True, "keep": 1, "dropout": 0.5, "group": ";;;"},
        {"wildcards": True, "shuffle": False, "keep": 0, "dropout": 0.0, "group": None},
        {"wildcards": True, "shuffle": True, "keep": 2, "dropout": 0.25, "group": ";;;"},
    ],
    ids=str,
)
def test_captions_are_as_often_as_there(given):
    """Every caption of theirs comes here, as often, and no other."""
    text = "1girl, {red|blue|green} hair;;;long hair, hat"
    rules = {"wildcards": given["wildcards"], "shuffle_tags": given["shuffle"], "tag_dropout": given["dropout"]}
    rules |= {"keep_tags": given["keep"]} if given["shuffle"] or given["dropout"] else {}
    rules |= {"tag_group": given["group"]} if given["group"] else {}
    count = 6000
    here = Counter(drawn(text, rules, count))
    there = Counter(theirs(text, seed, **given) for seed in range(count))
    assert here.keys() == there.keys()
    for caption, times in there.items():
        assert abs(here[caption] - times) < 5 * (2 * times) ** 0.5 + 5, caption


def test_what_is_left_out_changes_from_epoch_to_epoch():
    rules = {"tag_dropout": 0.5}
    assert drawn("a, b, c, d", rules, 50) == drawn("a, b, c, d", rules, 50)
    assert drawn("a, b, c, d", rules, 50) != drawn("a, b, c, d", rules, 50, epoch=1)


def test_all_tags_may_be_left_out_but_those_that_stay():
    assert {*drawn("a, b, c", {"tag_dropout": 1.0}, 5)} == {""}
    assert {*drawn("a, b, c", {"tag_dropout": 1.0, "keep_tags": 2}, 5)} == {"a, b"}


def test_double_braces_are_braces():
    assert {*drawn("{{a|b}} {c}", {"wildcards": True}, 50)} == {"{a|b} c"}
    assert {*drawn("a { b", {"wildcards": True}, 5)} == {"a { b"}


def test_a_group_is_written_out_where_nothing_moves():
    settings = SourceSettings(source="test", caption_dropout=0.0, captions={"tag_group": ";;;"})
    assert captions.possible({"text": "a;;;b"}, settings) == ["a, b"] == [*{*drawn("a;;;b", {"tag_group": ";;;"}, 3)}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep_tags": 1}, "no effect without shuffle_tags=true or tag_dropout"),
        ({"tag_separator": ";"}, "no effect without shuffle_tags=true, tag_dropout or tag_group"),
        ({"tag_dropout": 1.5}, "less than or equal to 1"),
    ],
)
def test_settings_without_effect_are_refused(given, message):
    with pytest.raises(ValidationError, match=message):
        SourceSettings(source="test", captions=given)
