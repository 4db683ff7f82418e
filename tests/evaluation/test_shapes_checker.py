"""The pixel checker reads real images right, softened ones too, and is not fooled by wrong ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from PIL import Image, ImageFilter

from daguerre.data.settings import CaptionSettings
from daguerre.data.sources import shapes as source
from daguerre.evaluation.metric import DrawnInputs
from daguerre.evaluation.metrics import shapes

ROWS, COLUMNS = np.mgrid[:64, :64] - 31.5
RED, BLUE, WHITE = (np.array(source.COLOURS[c], np.uint8) for c in ("red", "blue", "white"))


def real(count: int, split: source.Split) -> tuple[list[source.Prompt], list[np.ndarray]]:
    opened = source.open_source(source.Settings(), split)
    records = [opened.record(i) for i in range(count)]
    asked = [source.Prompt(r.texts["text"], source.Combination(**r.metadata)) for r in records]
    return asked, [np.asarray(r.image) for r in records]


def on_white(mask: np.ndarray, colour: np.ndarray = RED) -> np.ndarray:
    return np.where(mask[..., None], colour, WHITE).astype(np.uint8)


@pytest.mark.long
@pytest.mark.parametrize(
    ("split", "count"),
    [("held_out", 300), *(pytest.param(split, 1000, marks=pytest.mark.long) for split in ("train", "held_out"))],
)
def test_real_images_are_read_right(split: source.Split, count: int) -> None:
    table = shapes.shares(*real(count, split))
    assert set(table) == {"background", "colour", "shape", "size", "all"}
    assert min(table.values()) >= 0.995


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_every_combination_is_read_right(every: int) -> None:
    for combination in (source.combinations("train") + source.combinations("held_out"))[::every]:
        seen = shapes.check(source.render(combination))
        assert dataclasses.asdict(seen) == dataclasses.asdict(combination)


MOON: source.Shape = "moon"
NAMED = (*source.QUICKSTART_SHAPES, MOON)


def moons() -> list[source.Combination]:
    return [c for split in ("train", "held_out") for c in source.combinations(split, (MOON,))]


@pytest.mark.long
def test_every_combination_of_the_new_shape_is_read_right_and_is_no_old_shape() -> None:
    assert len(moons()) == 168
    for combination in moons():
        image = source.render(combination)
        assert dataclasses.asdict(shapes.check(image, NAMED)) == dataclasses.asdict(combination)
        assert shapes.check(image).shape == "none"


@pytest.mark.long
def test_a_further_name_changes_no_reading_of_the_old_shapes() -> None:
    asked, images = real(300, "held_out")
    soft = [np.asarray(Image.fromarray(p).filter(ImageFilter.GaussianBlur(1.5))) for p in images]
    for image in [*images, *soft]:
        assert shapes.check(image, NAMED) == shapes.check(image)
    assert len(asked) == len(images)


@pytest.mark.long  # of the quick tests, mild blur and noise do no harm
def test_softened_noisy_and_moved_new_shapes_are_read_right() -> None:
    settings = source.Settings(shapes=(MOON,), num_images=16)
    records = [source.open_source(settings, "held_out").record(i) for i in range(200)]
    asked = [source.Prompt(r.texts["text"], source.Combination(**r.metadata)) for r in records]
    soft = [np.asarray(Image.fromarray(np.asarray(r.image)).filter(ImageFilter.GaussianBlur(0.7))) for r in records]
    noise = np.random.default_rng(0).normal(0, 10, (len(soft), 64, 64, 3))
    noisy = [np.clip(p + n, 0, 255).astype(np.uint8) for p, n in zip(soft, noise, strict=True)]
    assert min(shapes.shares(asked, noisy, NAMED).values()) >= 0.99


@pytest.mark.parametrize("change", ["mirrored", "turned", "half moon", "thin"])
def test_other_moons_have_no_name(change: str) -> None:
    mask = source.coverage(MOON, 16.0, (0.0, 0.0)) > 0.5
    disc = np.hypot(COLUMNS, ROWS) < 16
    other = {
        "mirrored": mask[:, ::-1],
        "turned": mask.T,
        "half moon": disc & (COLUMNS < 0),
        "thin": disc & (np.hypot(COLUMNS - 5, ROWS) > 15),
    }[change]
    assert shapes.check(on_white(other), NAMED).shape == "none"


@pytest.mark.parametrize("count", [150, pytest.param(400, marks=pytest.mark.long)])
def test_mild_blur_and_noise_do_no_harm(count: int) -> None:
    asked, images = real(count, "held_out")
    soft = [np.asarray(Image.fromarray(p).filter(ImageFilter.GaussianBlur(1.0))) for p in images]
    assert min(shapes.shares(asked, soft).values()) >= 0.99
    noise = np.random.default_rng(0).normal(0, 10, (len(images), 64, 64, 3))
    noisy = [np.clip(p + n, 0, 255).astype(np.uint8) for p, n in zip(images, noise, strict=True)]
    assert min(shapes.shares(asked, noisy).values()) >= 0.99


@pytest.mark.parametrize("count", [200, pytest.param(600, marks=pytest.mark.long)])
def test_other_images_do_not_pass_for_the_asked_one(count: int) -> None:
    asked, images = real(count, "train")
    shifted = shapes.shares(asked, images[1:] + images[:1])
    assert shifted["all"] < 0.02
    assert abs(shifted["shape"] - 1 / 5) < 0.1
    assert abs(shifted["size"] - 1 / 3) < 0.1


def test_a_blank_image_shows_a_background_only() -> None:
    seen = shapes.check(np.tile(BLUE, (64, 64, 1)))
    assert seen == shapes.Reading("blue", "none", "none", "none")


def test_noise_and_colours_outside_the_palette_show_nothing() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert shapes.check(noise) == shapes.Reading("none", "none", "none", "none")
    assert shapes.check(np.full((64, 64, 3), 128, np.uint8)).background == "none"


def test_a_background_of_two_colours_is_none() -> None:
    assert shapes.check(on_white(COLUMNS < 0)).background == "none"


def test_two_shapes_are_not_one() -> None:
    left = (abs(COLUMNS + 14) < 8) & (abs(ROWS) < 8)
    right = (abs(COLUMNS - 14) < 8) & (abs(ROWS) < 8)
    assert shapes.check(on_white(left | right)).shape == "none"
    both = on_white(left)
    both[right] = BLUE
    assert shapes.check(both).colour == "none"


@pytest.mark.parametrize(
    "mask",
    [
        (COLUMNS / 22) ** 2 + (ROWS / 12) ** 2 < 1,
        abs(COLUMNS) + abs(ROWS) < 20,
        (np.hypot(COLUMNS, ROWS) < 20) & (np.hypot(COLUMNS, ROWS) > 9),
        (abs(COLUMNS) < 20) & (abs(ROWS) < 6),
        (abs(abs(COLUMNS) - abs(ROWS)) < 5) & (np.hypot(COLUMNS, ROWS) < 22),
        (abs(COLUMNS) < 18) & (abs(ROWS) < 12),
        source.coverage("star", 16.0, (0.0, 0.0))[::-1] > 0.5,
        source.coverage("triangle", 16.0, (0.0, 0.0))[::-1] > 0.5,
    ],
    ids=["ellipse", "diamond", "ring", "bar", "x", "rectangle", "star upside down", "triangle upside down"],
)
def test_shapes_outside_the_source_have_no_name(mask: np.ndarray) -> None:
    seen = shapes.check(on_white(mask))
    assert (seen.background, seen.colour, seen.shape, seen.size) == ("white", "red", "none", "none")


def test_sizes_in_between_have_no_name() -> None:
    for radius_px in (6.0, 31.0):
        covered = source.coverage("circle", radius_px, (0.0, 0.0)) > 0.5
        assert shapes.check(on_white(covered)).size == "none"


def test_an_image_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(64, 64, 3\) uint8"):
        shapes.check(np.zeros((32, 32, 3), np.uint8))


def test_evaluation_asks_for_held_out_combinations_and_says_must_and_aim() -> None:
    asked = source.prompts("held_out", 200, seed=0)

    def draw(texts: Sequence[str], references: Sequence[np.ndarray] = ()) -> list[np.ndarray]:
        assert list(texts) == [prompt.text for prompt in asked]
        images = [source.render(prompt.combination) for prompt in asked]
        return [np.zeros((64, 64, 3), np.uint8)] * 50 + images[50:]

    (result,) = shapes.evaluate(shapes.Settings(), DrawnInputs(source.Settings(), draw)).values()
    assert result.count == 200
    assert {row.name: row.must for row in result.rows} == {
        "background": 0.95,
        "colour": 0.95,
        "shape": 0.8,
        "size": 0.8,
        "all": None,
    }
    assert result.values()["shape"] == 0.75


def test_overlap_is_one_of_equal_outlines_whatever_their_colours() -> None:
    asked = source.combinations("held_out")[::7]
    for combination in asked:
        outline = source.render(combination, (3.0, -2.0))
        other = dataclasses.replace(combination, colour="white", background="black")
        assert shapes.overlap(outline, outline) == 1.0
        assert shapes.overlap(source.render(other, (3.0, -2.0)), outline) > 0.95


def test_overlap_falls_with_the_distance_and_with_another_shape() -> None:
    square = source.Combination("medium", "red", "square", "white")
    original = source.render(square)
    side_px = 2 * 0.85 * 16
    for shift_px in (1, 2, 4, 8):
        both = side_px - shift_px
        expected = both / (2 * side_px - both)
        assert shapes.overlap(source.render(square, (shift_px, 0.0)), original) == pytest.approx(expected, abs=0.02)
    assert shapes.overlap(source.render(dataclasses.replace(square, size="small")), original) < 0.6
    assert shapes.overlap(source.render(dataclasses.replace(square, shape="star")), original) < 0.7
    assert shapes.overlap(np.full((64, 64, 3), 250, np.uint8), original) == 0.0


def test_a_model_that_reads_control_images_is_asked_for_colours_and_compared_with_the_outlines() -> None:
    captions = CaptionSettings(fields=("colours",))
    marks = {"outline": 0.7, "colour": 0.8, "shape": None}
    settings = source.Settings(captions=captions, jitter_px=20, checked_prompts=40, marks=marks)
    held_out = source.open_source(settings, "held_out")

    def redraw(texts: Sequence[str], originals: Sequence[np.ndarray]) -> list[np.ndarray]:
        assert list(texts) == [held_out.record(i).texts["colours"] for i in range(40)]
        assert all("circle" not in text for text in texts)
        assert np.array_equal(originals[7], held_out.record(7).image)
        return [np.zeros((64, 64, 3), np.uint8)] * 10 + list(originals[10:])

    (result,) = shapes.evaluate(
        shapes.Settings(), DrawnInputs(settings, lambda texts, references=(): [], redraw)
    ).values()
    assert result.count == 40
    assert result.values()["outline"] == pytest.approx(0.75)
    assert result.values()["colour"] == result.values()["shape"] == 0.75
    assert {row.name: row.must for row in result.rows if row.must is not None} == {"outline": 0.7, "colour": 0.8}
    said = result.table("shapes")
    assert [line.split()[0] for line in said if "missed" in line] == ["colour"]
    assert "aim" not in said[0]


@pytest.mark.long  # of the quick tests, the new shape is read
def test_with_a_new_shape_the_quickstarts_own_prompts_are_measured_too() -> None:
    settings = source.Settings(shapes=(MOON,), num_images=16, checked_prompts=100, kept_prompts=200)
    new = source.prompts("held_out", 100, 0, settings.shapes, 16)
    old = source.prompts("held_out", 200, seed=0)
    said = {prompt.text: prompt.combination for prompt in [*new, *old]}

    def draw(texts: Sequence[str], references: Sequence[np.ndarray] = ()) -> list[np.ndarray]:
        """A model that draws nothing but moons."""
        return [source.render(dataclasses.replace(said[text], shape=MOON)) for text in texts]

    found = shapes.evaluate(shapes.Settings(), DrawnInputs(settings, draw))
    assert {name: (table.count, table.values()["shape"]) for name, table in found.items()} == {
        "shapes": (100, 1.0),
        "kept": (200, 0.0),
    }
    assert {row.name: (row.must, row.aim) for row in found["kept"].rows if row.must is not None} == shapes.MARKS
    assert [
        *shapes.evaluate(shapes.Settings(), DrawnInputs(settings.model_copy(update={"kept_prompts": 0}), draw))
    ] == ["shapes"]
    shown = new[0].combination
    assert all(c.shape == MOON for c in (p.combination for p in new))
    assert shown not in source.combinations("train", (MOON,), 16)
