"""`daguerre data stats`: the page holds the figures of the data, of filters and of buckets."""

import html
import re
import webbrowser
from pathlib import Path

import data_sets
import masked
import pytest

from daguerre.cli import main


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stats(*arguments) -> int:
    return main.run(["data", "stats", *map(str, arguments)])


def words(path) -> str:
    """The text of a page."""
    text = re.sub(r"<style>.*?</style>|<svg.*?</svg>", " ", Path(path).read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", text)))


def test_a_folder(place, capsys):
    data_sets.folder(place / "images", 10)
    assert stats("images", "data.resolution=32", "images=4") == 0
    first, *facts, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("images: read as a folder of images (data.source=folder)", "data-stats.html")
    assert facts[:2] == [
        "10 samples.",
        "  Usable               10  100 % of the 10 that were found, those held out among them",
    ]
    text = words("data-stats.html")
    assert "10 samples." in text
    assert "Usable 10 100 %" in text
    assert "Median caption 3 words" in text
    assert "32 x 32" in text
    assert Path("data-stats.html").read_text(encoding="utf-8").count("data:image/jpeg") == 4


def test_masks_are_counted(place, capsys):
    masked.folder(place / "images")
    (place / "images" / "00.mask.png").unlink()
    assert stats("images", "data.resolution=32") == 0
    assert "With a mask 11 92 % of those that pass" in words("data-stats.html")


def test_what_filters_and_buckets_do(place, capsys):
    data_sets.shards(place / "raw", 3, 10)
    filters = 'data.filters=score < 2 and lang == "en"'
    buckets = ("data.buckets.aspects=[1/1, 2/1]", "data.buckets.step=16", "data.resolution=48")
    assert stats("raw", filters, *buckets, "data.buckets.upscale=false", "-o", "page.html") == 0
    text = words("page.html")
    assert "30 samples in 3 shards. The filters keep 15 (50 %)." in text
    assert "No bucket takes" in text
    assert "score < 2 20 (67 %)" in text
    assert "lang == 'en' 22 (73 %) 15 (50 %)" in text
    assert "filter: score < 2 left out 10" in text
    assert "smaller than its bucket" in text
    assert "score 100 % 1.45 in the middle, 90 % from 0.145 to 2.755" in text
    assert "lang 100 % 2 different, most often en, de" in text


def test_broken_images_are_counted(place, capsys):
    whole = data_sets.jpeg(2)
    data_sets.shard(place / "raw" / "a.tar", range(6), p1=b"<html>", p2=whole[:-40])
    assert stats("raw", "data.resolution=32") == 0
    text = words("data-stats.html")
    assert "5 samples." in text
    assert "not an image" in text
    assert "truncated image (of those that were read)" in text


def test_a_source_that_draws(place, capsys):
    assert stats("quickstart", "read=50", "images=3", "-o", "shapes.html") == 0
    text = words("shapes.html")
    assert "these are its first 50" in text
    assert "Median size 64 x 64" in text


def test_the_sources_of_a_mix(place, capsys):
    data_sets.shards(place / "raw", 1, 5)
    data_sets.folder(place / "images", 4)
    text = "data:\n  source: mix\n  sources:\n    shards: {source: webdataset, path: raw}\n"
    (place / "mine.yaml").write_text(text + "    loose: {source: folder, path: images}\n", encoding="utf-8")
    assert stats("mine.yaml") == 0
    found = words("data-stats.html")
    assert found.index("shards 5 samples.") < found.index("loose 4 samples.")


def test_few_samples_are_read_where_few_are_asked_for(place, capsys):
    data_sets.shards(place / "raw", 2, 20)
    assert stats("raw", "read=5", "seed=3") == 0
    assert "5 captions that were read" in words("data-stats.html")
    first = Path("data-stats.html").read_bytes()
    assert stats("raw", "read=5", "seed=3") == 0
    images = re.compile(rb"base64,[^\"]+")
    assert images.findall(first) == images.findall(Path("data-stats.html").read_bytes())


def test_it_opens_the_page_when_asked(place, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    data_sets.folder(place / "images", 2)
    assert stats("images") == 0
    assert opened == []
    assert stats("images", "open=true") == 0
    assert opened == [(place / "data-stats.html").as_uri()]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "no data given"),
        (["raw", "data.filters=score > 99"], "none of the 4 samples passes"),
        (["raw", "data.buckets.aspects=[17/1]"], "aspects"),
        (["raw", "read=0"], "read"),
        (["raw", "redd=3"], "did you mean read"),
    ],
)
def test_what_is_refused(place, capsys, arguments, why):
    data_sets.shards(place / "raw", 1, 4)
    assert stats(*arguments) == 2
    assert why in capsys.readouterr().err
    assert not (place / "data-stats.html").exists()


def test_the_terminal_says_what_is_there_left_out_and_cropped(place, capsys):
    folder = data_sets.folder(place / "images", 12)
    (folder / "003.jpg").write_bytes(b"no image")
    (folder / "005.txt").unlink()
    (folder / "readme.txt").write_text("these are images")
    assert stats("images", "data.resolution=32", "data.filters=width > 40") == 0
    said = capsys.readouterr().out
    assert "10 samples. The filters keep 8 (80 %)." in said
    assert re.search(r"Usable +8 +67 % of the 12 that were found", said)
    assert re.search(r"Cropped +\d+\.\d % +of an image's pixels, on average", said)
    for count, reason in ((1, "not an image"), (1, "image without a caption: 005.jpg"), (2, "filter: width > 40")):
        assert re.search(rf" {count}  {re.escape(reason)}", said)
    assert "Usable 8 67 % of the 12 that were found" in words("data-stats.html")


def test_samples_without_a_caption_in_the_fields_in_use_are_not_usable(place, capsys):
    data_sets.shards(place / "raw", 1, 10)
    data_sets.shard(place / "raw" / "part-01.tar", range(10, 20), no_caption=True)
    assert stats("raw", "data.captions.fields=[caption]") == 0
    said = capsys.readouterr().out
    assert "Without a caption in the caption fields are 10." in said
    assert re.search(r"Usable +10 +50 % of the 20 that were found", said)
    assert "10  no caption in caption (data.captions.fields)" in said


def test_a_long_caption_is_cut_on_the_page(place):
    folder = data_sets.folder(place / "images", 2)
    (folder / "000.txt").write_text("cat " * 100_000)
    assert stats("images", "data.resolution=32") == 0
    assert Path("data-stats.html").stat().st_size < 100_000


def test_captions_of_several_lines_are_counted(place, capsys):
    folder = data_sets.folder(place / "images", 3)
    (folder / "000.txt").write_text("a cat\na pet")
    assert stats("images", "data.resolution=32") == 0
    assert re.search(r"noted:\n +1  caption of several lines: joined .* read\): 000", capsys.readouterr().out)
    assert "trained on all the same" in words("data-stats.html")
    assert stats("images", "data.resolution=32", "data.captions.lines=drawn") == 0
    assert "several lines" not in capsys.readouterr().out
