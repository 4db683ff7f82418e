"""The `shapes` source: facts of its images and captions, its split, its determinism."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
from pydantic import ValidationError

from daguerre.data.sources import shapes
from daguerre.evaluation.metrics.shapes import check


def test_there_is_enough_to_learn() -> None:
    assert len(shapes.COLOURS) >= 8
    assert len(shapes.SHAPES) >= 5
    assert len(shapes.RADII_PX) == 3
    assert len(shapes.PHRASINGS) >= 4


def test_one_combination_in_ten_is_held_out_and_no_value_is_lost() -> None:
    train, held_out = set(shapes.combinations("train")), set(shapes.combinations("held_out"))
    assert not train & held_out
    assert len(held_out) == (len(train) + len(held_out)) // 10
    assert all(c.colour != c.background for c in train | held_out)
    for attribute in ("size", "colour", "shape", "background"):
        seen = Counter(getattr(c, attribute) for c in train)
        every = Counter(getattr(c, attribute) for c in train | held_out)
        assert min(seen[value] / every[value] for value in every) > 0.8


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_record_is_a_function_of_its_index_alone(split: shapes.Split) -> None:
    first, again = (shapes.open_source(shapes.Settings(), split) for _ in range(2))
    late = again.record(41)
    for index in (7, 41, 10**9):
        a, b = first.record(index), again.record(index)
        assert a.key == b.key
        assert a.texts == b.texts
        assert np.array_equal(np.asarray(a.image), np.asarray(b.image))
    assert np.array_equal(np.asarray(late.image), np.asarray(first.record(41).image))


def test_ids_of_the_splits_never_meet() -> None:
    train, held_out = (shapes.open_source(shapes.Settings(), split) for split in ("train", "held_out"))
    assert train.index is None
    assert train.sample_id(2**61) < held_out.sample_id(0)
    assert 0 <= held_out.sample_id(2**61) < 2**63


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_records_show_their_split_and_say_what_they_show(split: shapes.Split) -> None:
    source = shapes.open_source(shapes.Settings(), split)
    allowed = {tuple(asdict(c).items()) for c in shapes.combinations(split)}
    for index in range(200):
        record = source.record(index)
        rendered = np.asarray(record.image)
        assert rendered.shape == (64, 64, 3)
        assert rendered.dtype == np.uint8
        assert tuple(record.metadata.items()) in allowed
        words = set(re.findall("[a-z]+", record.texts["text"]))
        assert words >= set(record.metadata.values())


def test_the_shape_stays_inside_and_moves() -> None:
    source = shapes.open_source(shapes.Settings(), "train")
    corners = []
    for index in range(300):
        record = source.record(index)
        rendered = np.asarray(record.image)
        back = np.array(shapes.COLOURS[record.metadata["background"]])
        rows, columns = np.nonzero((rendered != back).any(axis=-1))
        assert not (rendered[[0, -1]] != back).any()
        corners.append((rows.min(), columns.min()))
    assert len(set(corners)) > 100


def test_far_shapes_stay_inside_too_and_the_smaller_the_farther_they_go() -> None:
    source = shapes.open_source(shapes.Settings(jitter_px=20, shapes=tuple(shapes.SHAPES)), "train")
    offsets: dict[str, float] = {}
    for index in range(300):
        record = source.record(index)
        rendered = np.asarray(record.image)
        shape = (rendered != np.array(shapes.COLOURS[record.metadata["background"]])).any(axis=-1)
        assert not shape[[0, -1]].any()
        assert not shape[:, [0, -1]].any()
        size, columns = record.metadata["size"], np.nonzero(shape)[1]
        offsets[size] = max(offsets.get(size, 0.0), abs(columns.mean() - 31.5))
    assert offsets["small"] > 15
    assert offsets["large"] < offsets["medium"] < offsets["small"]


def test_a_second_caption_has_the_colours_alone() -> None:
    source, shown = shapes.open_source(shapes.Settings(), "train"), set()
    for index in range(50):
        record = source.record(index)
        words = set(re.findall("[a-z]+", record.texts["colours"]))
        assert words >= {record.metadata["colour"], record.metadata["background"]}
        assert not words & {*shapes.SHAPES, *shapes.RADII_PX}
        shown.add(len(words))
    assert len(shown) == len(shapes.COLOUR_PHRASINGS)


def test_no_jitter_means_centred() -> None:
    rendered = np.asarray(shapes.open_source(shapes.Settings(jitter_px=0), "train").record(0).image)
    assert np.array_equal(rendered, rendered[:, ::-1])


def test_prompts_cover_the_held_out_combinations_evenly() -> None:
    asked = shapes.prompts("held_out", 200, seed=1)
    counts = Counter(p.combination for p in asked)
    assert set(counts) == set(shapes.combinations("held_out"))
    assert max(counts.values()) - min(counts.values()) <= 1
    assert asked == shapes.prompts("held_out", 200, seed=1)
    assert asked != shapes.prompts("held_out", 200, seed=2)
    assert asked[:5] == shapes.prompts("held_out", 200, seed=1)[:5]


def test_a_shape_outside_the_image_is_refused() -> None:
    with pytest.raises(ValidationError, match="jitter_px"):
        shapes.Settings(jitter_px=25)


@pytest.mark.parametrize("given", [{"crop": "random"}, {"shuffle": False}, {"interpolation": "area"}])
def test_a_setting_that_would_have_no_effect_is_refused(given):
    with pytest.raises(ValueError, match="no effect on procedural images"):
        shapes.Settings(**given)


FEW = shapes.Settings(shapes=("moon",), num_images=16)


def test_the_quickstart_draws_its_five_shapes() -> None:
    assert shapes.Settings().shapes == shapes.QUICKSTART_SHAPES
    assert {c.shape for c in shapes.combinations("train")} == set(shapes.QUICKSTART_SHAPES)
    assert len(shapes.combinations("train") + shapes.combinations("held_out")) == 3 * 8 * 5 * 7


def test_a_number_of_images_means_these_again_and_again() -> None:
    source = shapes.open_source(FEW, "train")
    first = [source.record(i) for i in range(16)]
    assert len({np.asarray(r.image).tobytes() for r in first}) == 16
    for i in range(16, 48):
        again = source.record(i)
        assert np.array_equal(np.asarray(again.image), np.asarray(first[i % 16].image))
        assert again.metadata == first[i % 16].metadata
        assert again.key != first[i % 16].key
        assert source.sample_id(i) != source.sample_id(i % 16)
    every = {shapes.caption(shapes.Combination(**first[0].metadata), i) for i in range(len(shapes.PHRASINGS))}
    assert {source.record(i).texts["text"] for i in range(0, 16 * 40, 16)} == every


def test_sixteen_images_show_each_colour_and_background_twice_and_half_of_them_are_small() -> None:
    shown = shapes.combinations("train", ("moon",), 16)
    for attribute in ("colour", "background"):
        assert set(Counter(getattr(c, attribute) for c in shown).values()) == {2}
    assert Counter(c.size for c in shown) == {"small": 8, "medium": 4, "large": 4}
    assert {c.colour for c in shown if c.size == "small"} == set(shapes.COLOURS)
    assert {c.shape for c in shown} == {"moon"}


@pytest.mark.parametrize("drawn", [("moon",), ("circle", "moon"), shapes.QUICKSTART_SHAPES])
def test_all_other_combinations_are_held_out(drawn: tuple[shapes.Shape, ...]) -> None:
    train, held_out = (shapes.combinations(split, drawn, 20) for split in ("train", "held_out"))
    assert len(train) == 20
    assert len({*train, *held_out}) == len(train) + len(held_out) == 168 * len(drawn)
    assert {*train, *held_out} == {*shapes.combinations("train", drawn), *shapes.combinations("held_out", drawn)}
    assert all(c.colour != c.background for c in train + held_out)
    settings = shapes.Settings(shapes=drawn, num_images=20)
    seen = {tuple(shapes.open_source(settings, "held_out").record(i).metadata.values()) for i in range(50)}
    assert len(seen) > 20
    assert not seen & {tuple(asdict(c).values()) for c in train}


def test_a_shape_lies_about_its_centroid() -> None:
    axis = np.arange(64) - 31.5
    for shape in shapes.SHAPES:
        covered = shapes.coverage(shape, 20.0, (0.0, 0.0))
        assert abs(covered.sum(axis=0) @ axis / covered.sum()) < 0.2, shape
        assert abs(covered.sum(axis=1) @ axis / covered.sum()) < 0.2, shape


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"shapes": ["heart"]}, "moon"),
        ({"shapes": []}, "at least 1"),
        ({"shapes": ["star", "star"]}, "named twice"),
        ({"shapes": ["moon"], "num_images": 168}, "there are 168 combinations"),
        ({"num_images": 0}, "greater than or equal to 1"),
        ({"kept_prompts": 100}, "no effect without a shape that is new"),
        ({"marks": {"shape": 85}}, "less than or equal to 1"),
        ({"marks": {"hue": 0.5}}, "background"),
        ({"marks": {"all": 0.9}, "checked_prompts": 0}, "no effect with data.checked_prompts=0"),
    ],
)
def test_shapes_and_numbers_that_make_no_sense_are_refused(given, said) -> None:
    with pytest.raises(ValidationError, match=said):
        shapes.Settings(**given)


def test_a_source_without_checked_prompts_has_no_metric() -> None:
    assert shapes.open_source(shapes.Settings(), "train").metric == "shapes"
    assert shapes.open_source(shapes.Settings(checked_prompts=0), "train").metric is None


def test_words_are_those_of_the_captions() -> None:
    assert FEW.words() - shapes.Settings().words() == {"moon"}
    assert shapes.Settings().words() - FEW.words() == set(shapes.QUICKSTART_SHAPES)


def test_pairs_differ_in_size_alone_and_no_caption_says_it():
    own = shapes.Settings(preferred_size="large")
    for split in ("train", "held_out"):
        source, plain = (shapes.open_source(each, split) for each in (own, shapes.Settings()))
        for number in range(12):
            record = source.record(number)
            seen, other = (check(np.asarray(record.images[name])) for name in ("image", "rejected"))
            assert vars(seen) == record.metadata
            assert {**record.metadata, "size": "small"} == vars(other)
            for size in shapes.RADII_PX:
                assert size not in record.texts["text"]
            assert "  " not in record.texts["text"]
            assert plain.record(number).images.keys() == {"image"}
    asked = shapes.prompts("held_out", 40, 0, preferred_size="large")
    assert {prompt.combination for prompt in asked} == {*shapes.combinations("held_out", size="large")}
    assert not any("large" in prompt.text for prompt in asked)
