"""Captions: which fields, templates, tags and prefix make one, and that it is dropped for a set share of keys."""

import re
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from daguerre.data import captions
from daguerre.data.alternatives import SEVERAL_LINES
from daguerre.data.dataset import open_dataset
from daguerre.data.images.headers import Undecodable
from daguerre.data.loading.collate import Collator
from daguerre.data.loading.loader import Loading
from daguerre.data.settings import CaptionSettings, LoaderSettings, SourceSettings
from daguerre.data.skipped import Skips
from daguerre.data.sources import folder
from daguerre.types import Record

RECORD = Record("a", {"image": b""}, {"text": "a cat"})
MANY = Record(
    "b", {"image": b""}, {"text": "a cat", "long": "a cat on a mat", "tags": "cat, mat , red,,wool", "blank": " \n"}
)


def chosen(dropout, epoch=0, seed=0):
    settings = SourceSettings(source="test", caption_dropout=dropout)
    return [captions.choose(RECORD, settings, seed, np.array([i, epoch, 0])) for i in range(1000)]


def drawn(rules, record=MANY, count=600, dropout=0.0, seed=0, epoch=0, repeat=0):
    """The captions of `count` samples that hold the same record."""
    settings = SourceSettings(source="test", caption_dropout=dropout, captions=rules)
    return [captions.choose(record, settings, seed, np.array([i, epoch, repeat])) for i in range(count)]


@pytest.mark.parametrize(("dropout", "low", "high"), [(0.0, 0, 0), (1.0, 1000, 1000), (0.1, 70, 130), (0.5, 450, 550)])
def test_the_share_of_dropped_captions(dropout, low, high):
    drawn = chosen(dropout)
    assert low <= drawn.count("") <= high
    assert drawn.count("") + drawn.count("a cat") == 1000


def test_which_are_dropped_is_a_matter_of_the_key():
    assert chosen(0.5) == chosen(0.5)
    assert chosen(0.5) != chosen(0.5, epoch=1)
    assert chosen(0.5) != chosen(0.5, seed=1)


def test_a_field_is_chosen_by_its_name():
    assert set(drawn({"fields": ["long"]})) == {"a cat on a mat"}


def test_of_several_fields_one_is_drawn_alike_often():
    counts = Counter(drawn({"fields": ["text", "long"]}))
    assert set(counts) == {"a cat", "a cat on a mat"}
    assert all(250 <= count <= 350 for count in counts.values())


def test_fields_are_drawn_by_weight():
    counts = Counter(drawn({"fields": ["text", "long", "tags"], "weights": [1, 3, 0]}))
    assert set(counts) == {"a cat", "a cat on a mat"}
    assert 110 <= counts["a cat"] <= 190


def test_a_field_that_is_missing_or_blank_is_not_drawn():
    counts = Counter(drawn({"fields": ["nothing", "text", "blank", "long"], "weights": [100, 1, 100, 1]}))
    assert set(counts) == {"a cat", "a cat on a mat"}
    assert all(250 <= count <= 350 for count in counts.values())


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ({"fields": ["nothing"]}, "field nothing"),
        ({"fields": ["blank", "nothing"]}, "fields blank, nothing"),
        ({"fields": ["blank", "nothing"], "join": " "}, "fields blank, nothing"),
        ({"fields": ["blank", "text"], "weights": [1, 0]}, "fields blank, text"),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 1.0])
def test_without_any_caption_the_slot_stays_empty_even_where_it_would_be_dropped(rules, names, dropout):
    with pytest.raises(Undecodable, match=f"^no caption in the {names}$"):
        drawn(rules, dropout=dropout)


def test_fields_are_joined_in_their_order():
    assert set(drawn({"fields": ["long", "nothing", "text"], "join": ". "})) == {"a cat on a mat. a cat"}
    assert set(drawn({"fields": ["long", "text"], "join": ""})) == {"a cat on a mata cat"}


def test_a_template_is_drawn_and_holds_the_caption():
    templates = ["a photo of {}", "{}, painted", "{}"]
    counts = Counter(drawn({"templates": templates}))
    assert set(counts) == {"a photo of a cat", "a cat, painted", "a cat"}
    assert all(150 <= count <= 250 for count in counts.values())


def test_a_caption_is_no_template():
    record = Record("a", {"image": b""}, {"text": "{} {0} {x.__class__} %s"})
    assert set(drawn({"templates": ["<{}>"]}, record)) == {"<{} {0} {x.__class__} %s>"}


def test_tags_are_shuffled_and_kept_ones_lead():
    found = drawn({"fields": ["tags"], "shuffle_tags": True, "keep_tags": 1}, count=1200)
    counts = Counter(found)
    assert len(counts) == 6
    assert all(text.split(", ")[0] == "cat" for text in counts)
    assert all(sorted(text.split(", ")) == ["cat", "mat", "red", "wool"] for text in counts)
    assert all(150 <= count <= 250 for count in counts.values())
    assert len(set(drawn({"fields": ["tags"], "shuffle_tags": True}))) == 24
    assert set(drawn({"fields": ["tags"], "shuffle_tags": True, "keep_tags": 9})) == {"cat, mat, red, wool"}


def test_tags_are_separated_as_the_recipe_says():
    record = Record("a", {"image": b""}, {"text": "b|c |d"})
    found = drawn({"shuffle_tags": True, "tag_separator": " | "}, record)
    assert set(found) >= {"b | c | d", "d | c | b"}
    spaces = drawn({"shuffle_tags": True, "tag_separator": " "}, Record("a", {"image": b""}, {"text": "b  c d"}))
    assert set(spaces) == {"b c d", "b d c", "c b d", "c d b", "d b c", "d c b"}


def test_the_prefix_leads_what_is_not_dropped():
    counts = Counter(drawn({"prefix": "sks ", "shuffle_tags": True, "fields": ["text"]}, dropout=0.5))
    assert set(counts) == {"", "sks a cat"}


def test_the_order_of_the_rules():
    rules = {"fields": ["tags"], "templates": ["x, {}"], "shuffle_tags": True, "keep_tags": 1, "prefix": "p, "}
    texts = drawn(rules)
    assert all(text.startswith("p, x, ") and len(text.split(", ")) == 6 for text in texts)
    assert len({text.split(", ")[2] for text in texts}) == 1, "tags are shuffled before they stand in the template"
    assert len({text.split(", ")[3] for text in texts}) > 1


EVERYTHING = {
    "fields": ["text", "long", "tags"],
    "templates": ["{}", "a photo of {}"],
    "shuffle_tags": True,
    "prefix": "p ",
}


def test_draws_are_a_matter_of_the_key_alone():
    base = drawn(EVERYTHING, dropout=0.3)
    assert drawn(EVERYTHING, dropout=0.3) == base
    assert drawn(EVERYTHING, dropout=0.3, count=700)[:600] == base
    for other in ({"seed": 1}, {"epoch": 1}, {"repeat": 1}):
        changed = drawn(EVERYTHING, dropout=0.3, **other)
        assert 0.3 < np.mean([a != b for a, b in zip(base, changed, strict=True)]) < 1.0


def test_draws_of_different_rules_do_not_follow_each_other():
    """The field that is drawn says nothing about whether the caption is dropped, nor about the template."""
    rules = {"fields": ["text", "long"], "templates": ["1 {}", "2 {}"]}
    whole, with_dropout = drawn(rules, count=2000), drawn(rules, count=2000, dropout=0.5)
    dropped = [text for text, seen in zip(whole, with_dropout, strict=True) if not seen]
    counts = Counter(dropped)
    assert len(counts) == 4
    assert all(180 <= count <= 320 for count in counts.values())


def test_the_draws_are_these():
    """Pinned: another caption for the same key would silently change what a resumed run is trained on."""
    assert drawn(EVERYTHING, count=6, dropout=0.3) == PINNED


PINNED = ["p a cat", "p a cat", "p a photo of red, mat, cat, wool", "", "p a photo of a cat", ""]


@settings(max_examples=80, deadline=None)
@given(
    texts=st.dictionaries(st.sampled_from(["text", "long", "tags"]), st.text(max_size=20)),
    weights=st.none() | st.lists(st.floats(0, 1e9), min_size=2, max_size=2).filter(any),
    key=st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 9), st.integers(0, 9)),
)
def test_whatever_the_texts_are_one_of_them_is_chosen_or_the_slot_is_empty(texts, weights, key):
    rules = CaptionSettings(fields=("text", "long"), weights=None if weights is None else tuple(weights))
    found = SourceSettings(source="test", caption_dropout=0.0, captions=rules)
    usable = {
        " ".join(line.strip() for line in re.split(r"[\r\n]+", texts[name]) if line.strip())
        for name, weight in zip(rules.fields, weights or (1, 1), strict=True)
        if name in texts and texts[name].strip() and weight > 0
    }
    if not usable:
        with pytest.raises(Undecodable):
            captions.choose(Record("a", {"image": b""}, texts), found, 0, np.array(key))
    else:
        assert captions.choose(Record("a", {"image": b""}, texts), found, 0, np.array(key)) in usable


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"fields": []}, "at least 1"),
        ({"fields": ["a", "b"], "weights": [1]}, "2 fields want 2 weights"),
        ({"fields": ["a"], "weights": [0]}, "above 0"),
        ({"fields": ["a"], "weights": [-1]}, "greater than or equal to 0"),
        ({"fields": ["a", "b"], "weights": [1, 1], "join": " "}, "join takes all of them"),
        ({"templates": ["a photo"]}, "each must have {} once"),
        ({"templates": ["{} {}"]}, "each must have {} once"),
        ({"keep_tags": 2}, "no effect without shuffle_tags"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules, words):
    with pytest.raises(ValidationError) as caught:
        CaptionSettings(**rules)
    assert words in caught.value.errors()[0]["msg"]


def test_a_dropped_caption_is_empty_as_a_whole_whatever_it_was_made_of():
    """One text a sample, which the family encodes for all of its encoders: what is dropped is dropped for all."""
    rules = {"fields": ["text", "tags"], "join": ", ", "templates": ["a photo of a {}"], "prefix": "sharp, "}
    found = drawn(rules, dropout=0.5)
    assert set(found) == {"", "sharp, a photo of a a cat, cat, mat , red,,wool"}
    assert set(drawn(rules, dropout=1.0)) == {""}


def test_words_of_classes_are_dropped_like_any_caption(tmp_path):
    """Labels become words in the source; nothing of the class is left where the caption is dropped."""
    for label in ("n01440764", "n01443537"):
        (tmp_path / label).mkdir()
        Image.fromarray(np.zeros((20, 20, 3), dtype=np.uint8)).save(tmp_path / label / "0.png")
    given = {"path": str(tmp_path), "captions_from": "folder_names", "resolution": 16, "held_out_fraction": 0}
    given |= {"idx_to_prompt": {"n01440764": "tench", "n01443537": "goldfish"}}
    settings = folder.Settings(**given, caption_dropout=0.5, captions={"templates": ["a photo of a {}"]})
    dataset = open_dataset(settings, "train")
    tasks = Loading(dataset, LoaderSettings(), 0, 2, 2, lambda batch: {}, lambda texts: {}).tasks(0)
    made = [Collator(dataset.members, 0).collate(task)[0].texts for task, _ in islice(tasks, 100)]
    texts = Counter(text for batch in made for text in batch)
    assert set(texts) == {"", "a photo of a tench", "a photo of a goldfish"}
    assert 70 < texts[""] < 130


LINES = Record("a", {}, {"text": "a red shape\r\n\r\n a blue thing \n", "tags": "one, two", "tags.1": "three"}, {})


def test_a_caption_of_several_lines():
    assert set(drawn({}, LINES)) == {"a red shape a blue thing"}
    assert set(drawn({"lines": "joined"}, LINES)) == {"a red shape a blue thing"}
    assert set(drawn({"lines": "first"}, LINES)) == {"a red shape"}
    found = Counter(drawn({"lines": "drawn"}, LINES))
    assert found.keys() == {"a red shape", "a blue thing"}
    assert 240 < found["a red shape"] < 360


def test_one_of_the_texts_of_a_field_is_drawn_and_shares_its_weight():
    assert set(drawn({"fields": ["tags"]}, LINES)) == {"one, two", "three"}
    found = Counter(drawn({"fields": ["text", "tags"], "weights": [2, 1]}, LINES))
    assert 340 < found["a red shape a blue thing"] < 460
    assert 60 < found["three"] < 140
    joined = {"fields": ["text", "tags"], "join": "; ", "lines": "first"}
    assert set(drawn(joined, LINES)) == {"a red shape; one, two", "a red shape; three"}


@pytest.mark.parametrize("rules", [{}, {"lines": "drawn"}, {"lines": "first", "fields": ["text", "tags"]}])
def test_what_may_be_drawn_of_lines_is_what_is_drawn(rules):
    given = SourceSettings(source="x", captions=rules, caption_dropout=0.0)
    assert set(captions.possible(LINES.texts, given)) == set(drawn(rules, LINES))


@pytest.mark.parametrize("lines", [None, "first", "drawn", "joined"])
def test_lines_are_noted_where_nobody_said_what_they_mean(tmp_path, lines):
    for i in range(4):
        Image.fromarray(np.full((20, 20, 3), i, dtype=np.uint8)).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text("one line" if i % 2 else "one\ntwo")
    settings = folder.Settings(path=str(tmp_path), resolution=16, held_out_fraction=0, captions={"lines": lines})
    dataset = open_dataset(settings, "train")
    skips = Skips()
    loading = Loading(dataset, LoaderSettings(), 0, 2, 2, lambda batch: {}, lambda texts: {}, skips)
    with loading.updates(0) as updates:
        batches = [batch for update in islice(updates, 4) for batch in update]
    assert all(batch.valid_B.all() for batch in batches)
    counts = {reason: (entry["count"], entry["kept"]) for reason, entry in skips.reasons.items()}
    assert counts == ({SEVERAL_LINES: (2, True)} if lines is None else {})
