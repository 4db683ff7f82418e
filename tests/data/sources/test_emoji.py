"""The source `emoji`: its table, what a font draws of it, and what is held out."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from emoji_fonts import HAND, POINTS, colour_font
from PIL import Image
from pydantic import ValidationError

from daguerre.data.dataset import open_datasets
from daguerre.data.images import emoji_pictures
from daguerre.data.plan.selection import select
from daguerre.data.sources import emoji
from daguerre.data.sources.emoji import HELD_OUT, TONES, Settings, open_source, table
from daguerre.errors import UserError

FONT = next((place for place in emoji.PLACES if Path(place).is_file()), None)


@pytest.fixture
def font(tmp_path):
    return colour_font(tmp_path / "few.ttf")


def opened(font, **given):
    return open_source(Settings(font=str(font), **given), "train")


def test_the_table_has_each_emoji_once_with_a_name_of_its_own():
    every = table()
    assert len({one.text for one in every}) == len({one.name for one in every}) == len(every)
    assert [one for one in every if one.tone is None] == [*table(False)]
    named = {one.name: one for one in every}
    assert (named["red heart"].code, named["red heart"].group) == ("2764", "smileys-emotion")
    assert named["waving hand, medium skin tone"].code == "1F44B-1F3FD"
    assert named["person: blond hair, dark skin tone"].code == "1F471-1F3FF"
    assert named["detective, light skin tone"].code == "1F575-1F3FB"
    assert {one.tone for one in every} == {None, *TONES}


def test_all_colours_shapes_hands_and_tones_are_trained_on_though_some_pairs_are_held_out():
    trained = {one.name for one in table() if not one.held_out}
    colours, shapes = {"red", "orange", "yellow", "green", "blue", "purple", "brown"}, {"circle", "square", "heart"}
    for pair in HELD_OUT:
        colour, shape = pair.split()
        assert pair not in trained
        assert any(f"{colour} {other}" in trained for other in shapes)
        assert any(f"{other} {shape}" in trained for other in colours)
    hands = [one for one in table() if one.subgroup.startswith("hand") and one.tone]
    held_out = [one for one in hands if one.held_out]
    assert len(held_out) == pytest.approx(len(hands) / 6, abs=1)
    assert {one.tone for one in held_out} == {*TONES}
    for i in range(0, len(hands), len(TONES)):
        assert sum(one.held_out for one in hands[i : i + len(TONES)]) <= 1


def test_the_split_is_the_sources_own(font):
    train, held_out = open_datasets(Settings(font=str(font)), ["train", "held_out"])
    source = train.members[0].source
    drawn = {one.name for one in source.drawn}
    assert train.size + held_out.size == len(drawn) == len(POINTS) + len(TONES)
    assert {source.drawn[n].name for n in held_out.selections[0].numbers} == {
        one.name for one in table() if one.held_out and one.name in drawn
    }


def test_what_a_font_has_is_drawn_and_the_rest_is_counted(font):
    source = opened(font)
    assert [one.text for one in source.drawn if not one.is_joined] == [
        one.text for one in table() if len(one.text) == 1 and ord(one.text) in POINTS
    ]
    toned = [one for one in source.drawn if one.is_joined]
    assert [one.tone for one in toned] == [*TONES]
    assert all(ord(one.text[0]) == HAND for one in toned)
    assert sum(entry["count"] for entry in source.report().values()) == len(table()) - len(source.drawn)
    pictures = {source.record(i).image.tobytes() for i in range(len(source.drawn))}
    assert len(pictures) == len(source.drawn)
    number = [one.name for one in source.drawn].index("red apple")
    assert source.record(number).image[-20, 20].tolist() == [26, 102, 230]  # of the small square in the corner


def test_metadata_filters_choose_groups(font):
    settings = Settings(font=str(font), filters='group == "food-drink" or tone == "dark"')
    source = open_source(settings, "train")
    (train,) = select(source.index, settings, ["train"])
    assert {source.drawn[n].name for n in train.numbers} <= {"red apple", "waving hand, dark skin tone"}
    assert "red apple" in {source.drawn[n].name for n in train.numbers}


def test_another_font_has_other_samples(font, tmp_path):
    other = colour_font(tmp_path / "other.ttf", tones=False)
    same = tmp_path / "moved.ttf"
    same.write_bytes(font.read_bytes())
    ids = opened(font).index.ids
    assert ids.tolist() == opened(same).index.ids.tolist()
    assert not {*ids.tolist()} & {*opened(other).index.ids.tolist()}


def test_no_tones_no_sequences(font, monkeypatch):
    assert not any(one.tone for one in opened(font, tones=False).drawn)
    emoji._drawable.cache_clear()
    emoji_pictures.open_pictures.cache_clear()
    monkeypatch.setattr(emoji_pictures.features, "check", lambda name: name != "fribidi")
    source = opened(font)
    emoji._drawable.cache_clear()
    emoji_pictures.open_pictures.cache_clear()
    assert not any(one.is_joined for one in source.drawn)
    (entry,) = (entry for reason, entry in source.report().items() if "libfribidi0" in reason)
    assert entry["count"] == sum(one.is_joined for one in table())


def test_pictures_stand_on_the_colour_that_is_asked_for(tmp_path):
    if FONT is None:
        pytest.skip("no emoji font on this machine: apt install fonts-noto-color-emoji")
    white, blue = (opened(FONT, alpha_colour=colour, tones=False).record(0).image for colour in ("#ffffff", "#0000ff"))
    assert white[0, 0].tolist() == [255, 255, 255]
    assert blue[0, 0].tolist() == [0, 0, 255]
    middle = (slice(60, 62), slice(66, 68))
    assert np.array_equal(white[middle], blue[middle])


def test_a_folder_of_pictures_is_as_good_as_a_font(font, tmp_path):
    """Names as Google, Noto and Twemoji write them; what is no emoji, and what is of none of our names, is left."""
    drawn, names = opened(font), [lambda code: code.lower(), lambda code: f"emoji_u{code.lower().replace('-', '_')}"]
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i, one in enumerate(drawn.drawn):
        Image.fromarray(drawn.picture(one.text)).save(folder / f"{names[i % 2](one.code)}.png")
    for name in ("notes.txt", "cover.png", "1f3fb.png"):
        Image.new("RGB", (8, 8), "red").save(folder / name, format="PNG")
    found = opened(folder)
    assert found.drawn == drawn.drawn
    assert all(np.array_equal(found.record(i).image, drawn.record(i).image) for i in range(len(found.drawn)))
    assert not {*found.index.ids.tolist()} & {*drawn.index.ids.tolist()}  # other pictures for all that it knows
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert opened(copy).index.ids.tolist() == found.index.ids.tolist()
    (copy / f"{names[0](drawn.drawn[0].code)}.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"is not a picture that can be opened.*Remove or replace it"):
        opened(copy)
    with pytest.raises(UserError, match="no picture of this folder is named by the code points"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"font": "nowhere.ttf"}, "there is no file or folder nowhere.ttf"),
        ({"font": __file__}, "is not a font that can be opened"),
    ],
)
def test_a_font_that_is_none_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        open_source(Settings(**given), "train")


def test_a_font_whose_emoji_come_out_empty_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"blank\.ttf: no emoji of this font is drawn.*COLR version 1"):
        opened(colour_font(tmp_path / "blank.ttf", blank=True))


def test_no_font_is_one_sentence(monkeypatch):
    monkeypatch.setattr(emoji, "PLACES", ())
    with pytest.raises(UserError, match="apt install fonts-noto-color-emoji libfribidi0"):
        open_source(Settings(), "train")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"resolution": 256}, "128 or fewer"),
        ({"held_out_fraction": 0.1}, "the source itself says"),
        ({"formats": ["png"]}, "no effect on pictures that are drawn"),
    ],
)
def test_settings_without_effect_are_refused(given, message):
    with pytest.raises(ValidationError, match=message):
        Settings(**given)
