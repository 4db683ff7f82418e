"""`daguerre data show`: the sheet holds what the network sees, and words that can be read."""

from pathlib import Path

import data_sets
import masked
import numpy as np
import pytest
from PIL import Image, ImageFont

from daguerre.cli import main
from daguerre.cli.data import show as data_show
from daguerre.cli.data.show import Cell
from daguerre.data.sources import shapes


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def show(*arguments) -> int:
    return main.run(["data", "show", *map(str, arguments)])


def cell(width, height, caption="a cat", colour=(200, 30, 90)) -> Cell:
    return Cell(Image.new("RGB", (width, height), colour), caption, f"{width} x {height}")


def test_it_writes_the_sheet_and_prints_its_path(place, capsys):
    data_sets.folder(place / "images", 10)
    assert show("images", "count=6", "data.resolution=32") == 0
    assert capsys.readouterr().out.endswith("data-show.png\n")
    with Image.open("data-show.png") as sheet:
        assert sheet.width == 1600
        assert len(sheet.convert("RGB").getcolors(1 << 24)) > 100


def test_the_same_command_shows_the_same(place, capsys):
    data_sets.shards(place / "raw", 2, 20)
    arguments = ("raw", "count=5", "data.resolution=32", "data.crop=random", "data.random_flip=true")
    sheets = []
    for seed in (1, 1, 2):
        assert show(*arguments, f"seed={seed}") == 0
        sheets.append(Path("data-show.png").read_bytes())
    assert sheets[0] == sheets[1] != sheets[2]


def test_pixels_are_those_that_are_trained_on(place, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(data_show, "sheet", lambda cells: seen.extend(cells) or Image.new("RGB", (1, 1)))
    assert show("quickstart", "count=3") == 0
    source = shapes.open_source(shapes.Settings(), "train")
    for number, one in enumerate(seen):
        record = source.record(number)
        assert np.array_equal(np.asarray(one.image), record.image)
        assert one.caption == record.texts["text"]
        assert one.note == "64 x 64"


def test_buckets_give_images_of_several_shapes(place, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(data_show, "sheet", lambda cells: seen.extend(cells) or Image.new("RGB", (1, 1)))
    data_sets.folder(place / "images", 10)
    assert show("images", "data.resolution=32", "data.buckets.aspects=[1/1, 2/1]", "data.buckets.step=8") == 0
    shapes = {one.image.size for one in seen}
    assert len(shapes) > 1
    assert any(" -> " in one.note for one in seen)


def test_a_mask_stands_beside_its_image(place, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(data_show, "sheet", lambda cells: seen.extend(cells) or Image.new("RGB", (1, 1)))
    masked.folder(place / "images", count=6)
    settings = ("data.resolution=32", "data.interpolation=area", "data.random_flip=true", "data.crop=random")
    assert show("images", "count=6", *settings) == 0
    assert len(seen) == 6
    for one in seen:
        left, mask = np.asarray(one.image)[:, :32], np.asarray(one.image)[:, 32:]
        assert mask.shape == left.shape
        assert np.array_equal(mask[..., 1], left[..., 0])  # red is the mask


def test_what_cannot_be_shown_is_named(place, capsys):
    data_sets.shard(place / "raw" / "a.tar", range(6), p2=data_sets.jpeg(2)[:-40])
    assert show("raw", "data.resolution=32") == 0
    said = capsys.readouterr().out
    assert "not shown:" in said
    assert "truncated image" in said


def test_rows_fill_the_sheet_and_images_keep_their_shape():
    cells = [cell(w, h) for w, h in [(64, 64), (128, 64), (64, 128)] * 5]
    for row, height in data_show._rows(cells)[:-1]:
        used = sum(data_show._width(one, height) for one in row) + 16 * (len(row) + 1)
        assert 1600 - len(row) - 16 < used <= 1600
        assert height <= 240
    sheet = data_show.sheet(cells)
    assert sheet.getpixel((20, 20)) == (200, 30, 90)


def test_a_single_small_image_is_not_blown_up_to_the_whole_sheet():
    sheet = data_show.sheet([cell(8, 8)])
    assert sheet.height < 400


@pytest.mark.parametrize("text", ["a cat", "word " * 200, "x" * 500, "", "a\nb\tc", "猫 " * 400])
def test_captions_are_wrapped_within_their_image(text):
    font = ImageFont.load_default(15)
    lines = data_show._wrapped(text, 150, font)
    assert len(lines) <= 4
    assert all(font.getlength(line) <= 160 for line in lines)
    if len(text) < 20:
        assert " ".join(lines) == " ".join(text.split())
    else:
        assert lines[-1].endswith("...")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["images", "-o", "sheet.pdf"], "its name must end in"),
        (["images", "count=0"], "count"),
        ([], "no data given"),
    ],
)
def test_what_is_refused(place, capsys, arguments, why):
    data_sets.folder(place / "images", 2)
    assert show(*arguments) == 2
    assert why in capsys.readouterr().err


class Ruler:
    """A font whose letters are 10 px wide; counts how often it is asked."""

    def __init__(self):
        self.asked = 0

    def getlength(self, text):
        self.asked += 1
        return 10 * len(text)


@pytest.mark.parametrize(("caption", "line"), [("x" * 40_000, "x" * 20), ("cat " * 10_000, "cat cat cat cat cat")])
def test_a_caption_of_any_length_is_wrapped_with_little_work(caption, line):
    ruler = Ruler()
    lines = data_show._wrapped(caption, 200, ruler)
    assert lines[:3] == [line] * 3
    assert len(lines) == 4
    assert lines[3].endswith("...")
    assert ruler.asked < 200


def test_control_images_stand_on_the_right_stored_or_computed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos"
    folder.mkdir()
    pixels = np.full((64, 64, 3), (200, 30, 30), np.uint8)
    pixels[:, 40:] = (30, 30, 200)
    Image.fromarray(pixels).save(folder / "a.png")
    (folder / "a.txt").write_text("two colours")
    stored = Image.new("RGBA", (64, 64), (0, 255, 0, 255))
    stored.paste((0, 0, 0, 0), (0, 0, 64, 32))
    stored.save(folder / "a.control.png")
    arguments = ["data", "show", str(folder), "data.resolution=64", "data.held_out_fraction=0"]
    assert main.run([*arguments, "-o", "stored.png"]) == 0
    assert main.run([*arguments, "-o", "edges.png", "condition=canny", "condition.low=50"]) == 0
    stored, edges = (np.asarray(Image.open(name).convert("RGB")) for name in ("stored.png", "edges.png"))
    assert (stored == (0, 255, 0)).all(axis=2).sum() > 1000
    assert {(160, 160, 160), (220, 220, 220)} <= {*map(tuple, stored.reshape(-1, 3).tolist())}
    assert (edges == 255).all(axis=2).any()
    assert not (edges == (0, 255, 0)).all(axis=2).any()
    capsys.readouterr()
    assert main.run([*arguments, "condition=cany"]) == 2
    assert "Did you mean 'canny'" in capsys.readouterr().err
