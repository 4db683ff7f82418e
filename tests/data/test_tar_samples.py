"""Which members make a sample, and what its texts say."""

import json
import random
import sys

import pytest
import tars

from daguerre.data.tar import index as tar_index
from daguerre.data.tar import reader
from daguerre.data.tar import samples as tar_samples
from daguerre.data.tar.samples import Unusable, words

USUAL = ("jpeg", "png", "webp")


def joined(*names: str, formats=USUAL):
    data = tars.packed((name, name.encode("utf-8", "surrogateescape")) for name in names)
    counts = {}
    samples = tar_samples.joined(reader.contents(data).members, formats, counts)
    shown = {
        sample.key: {"": sample.image.name}
        | {f"{name} image": member.name for name, member in sample.images}
        | {name: member.name for name, member in sample.parts}
        for sample in samples
    }
    assert len(shown) == len(samples)
    return shown, {reason: entry["count"] for reason, entry in counts.items()}


def test_members_that_stand_together():
    assert joined("a.jpg", "a.txt", "b.PNG", "b.json", "b.caption.txt") == (
        {
            "a": {"": "a.jpg", "txt": "a.txt"},
            "b": {"": "b.PNG", "json": "b.json", "caption.txt": "b.caption.txt"},
        },
        {},
    )


def test_members_wherever_they_stand():
    samples, counts = joined("b.txt", "d/a.jpg", "c.webp", "c.json", "b.jpg", "d/a.txt", "c.txt")
    assert list(samples) == ["d/a", "c", "b"]  # the order of the images
    assert samples["c"] == {"": "c.webp", "json": "c.json", "txt": "c.txt"}
    assert samples["b"]["txt"] == "b.txt"
    assert not counts


def test_folders_are_part_of_a_key_and_dots_in_them_are_not():
    samples, counts = joined("v1.0/a.jpg", "v1.0/a.txt", "v2/a.jpg", "v2/a.txt")
    assert {key: parts["txt"] for key, parts in samples.items()} == {"v1.0/a": "v1.0/a.txt", "v2/a": "v2/a.txt"}
    assert not counts


def test_several_images_of_one_key_have_the_members_of_their_own_names():
    samples, counts = joined("a.1.jpg", "a.2.jpg", "a.1.txt", "a.2.txt", "a.2.tags.txt", "a.json")
    assert samples == {
        "a.1": {"": "a.1.jpg", "txt": "a.1.txt"},
        "a.2": {"": "a.2.jpg", "txt": "a.2.txt", "tags.txt": "a.2.tags.txt"},
    }
    assert counts == {"member without an image of its name": 1}


def test_a_mask_beside_an_image_takes_none_of_its_texts():
    samples, counts = joined("a.jpg", "a.mask.png", "a.txt", "a.json")
    assert samples == {"a": {"": "a.jpg", "mask image": "a.mask.png", "txt": "a.txt", "json": "a.json"}}
    assert not counts


def test_masks_stand_anywhere_and_belong_to_the_image_of_their_name_up_to_the_dot():
    samples, counts = joined("b.mask.PNG", "b.mask.webp", "a.1.mask.png", "a.1.jpg", "a.2.jpg", "b.jpg", "a.2.txt")
    assert samples == {
        "a.1": {"": "a.1.jpg", "mask image": "a.1.mask.png"},
        "a.2": {"": "a.2.jpg", "txt": "a.2.txt"},
        "b": {"": "b.jpg", "mask image": "b.mask.PNG"},
    }
    assert counts == {"duplicate: second image of one name": 1}


def test_a_mask_without_an_image_is_one_itself():
    assert joined("a.mask.png", "a.mask.txt") == ({"a.mask": {"": "a.mask.png", "txt": "a.mask.txt"}}, {})


def test_one_image_with_dots_has_all_members_of_its_key():
    samples, counts = joined("a.v1.0.jpg", "a.v1.0.txt", "a.json")
    assert samples == {"a.v1.0": {"": "a.v1.0.jpg", "txt": "a.v1.0.txt", "json": "a.json"}}
    assert not counts


def test_of_members_of_one_name_the_first_counts():
    samples, counts = joined("a.jpg", "a.txt", "a.TXT", "b.jpg", "b.txt", "a.json", "a.txt")
    assert samples["a"] == {"": "a.jpg", "txt": "a.txt", "json": "a.json"}
    assert counts == {"duplicate: member with the same name as an earlier one": 2}


def test_whole_samples_of_one_key_are_samples_of_their_own():
    """As in webdataset: two sets that were joined into one tar use the same numbers."""
    data = tars.packed(
        [(name, b"") for name in ("0.jpg", "0.txt", "1.jpg", "1.txt", "0.jpg", "0.txt", "1.jpg", "1.txt")]
    )
    counts = {}
    samples = tar_samples.joined(reader.contents(data).members, USUAL, counts)
    assert [sample.key for sample in samples] == ["0", "1", "0", "1"]
    assert all(len(sample.parts) == 1 for sample in samples)
    assert not counts


def test_two_images_of_one_name():
    samples, counts = joined("a.jpg", "a.png", "a.txt")
    assert samples == {"a": {"": "a.jpg", "txt": "a.txt"}}
    assert counts == {"duplicate: second image of one name": 1}


def test_what_belongs_to_no_sample_is_counted():
    samples, counts = joined("a.gif", "a.txt", "README", "b.txt", "__meta__", "__x__/y.jpg", "c.heic", "d.jpg", "d.txt")
    assert list(samples) == ["d"]
    assert counts == {
        "member without an extension": 1,
        "webdataset's own member (__NAME__)": 2,
        "image in a format that is not read (data.formats)": 2,
        "member without an image of its name": 2,
    }
    assert list(joined("a.gif", "a.txt", "b.tif", formats=("gif", "tiff"))[0]) == ["a", "b"]


def test_nfc_and_nfd_twins_are_two_samples():
    samples, _ = joined("caf\u00e9.jpg", "cafe\u0301.jpg", "caf\u00e9.txt", "cafe\u0301.txt")
    assert {key: parts["txt"] for key, parts in samples.items()} == {
        "caf\u00e9": "caf\u00e9.txt",
        "cafe\u0301": "cafe\u0301.txt",
    }


def test_names_that_are_no_utf_8_are_joined_and_can_be_printed():
    samples, _ = joined("\udcff.jpg", "\udcff.txt")
    assert list(samples) == ["\\xff"]
    assert samples["\\xff"]["txt"] == "\udcff.txt"


def test_texts_of_a_sample():
    said = words({"json": json.dumps({"caption": "j", "url": "u", "n": 1}).encode(), "txt": b" t \n", "tags.txt": b"x"})
    assert said.texts == {"caption": "j", "url": "u", "txt": " t \n", "tags.txt": "x", "text": "t"}
    assert said.metadata == {"caption": "j", "url": "u", "n": 1}
    assert set(said.used) == {"json", "txt", "tags.txt"}


@pytest.mark.parametrize(
    ("parts", "caption"),
    [
        ({"txt": b"t", "json": b'{"caption": "c", "text": "x"}'}, "t"),
        ({"txt": b" \n", "json": b'{"caption": "c", "text": "x"}'}, "c"),
        ({"json": b'{"caption": null, "text": "x"}'}, "x"),
        ({"json": b'{"caption": 3}'}, None),
        ({"text": b"member", "json": b'{"caption": "c"}'}, "member"),
        ({"txt": b"\xef\xbb\xbfmarked"}, "marked"),
        ({"cls": b"7"}, None),
    ],
)
def test_which_text_is_the_caption(parts, caption):
    assert words(parts).texts.get("text") == caption


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"txt": b"\xff"}, "caption that is not UTF-8"),
        ({"txt": b"a\0b"}, "caption with zero bytes in it"),
        ({"x.txt": b"\xff"}, "caption that is not UTF-8"),
        ({"txt": b"a" * (tar_samples.TEXT_BYTES + 1)}, "caption of more than"),
        ({"json": b"{"}, "JSON that does not parse"),
        ({"json": b"[" * 100_000}, "JSON that does not parse"),
        ({"json": b"[]"}, "JSON that is not an object"),
        ({"json": b'{"a": "\xff"}'}, "JSON that is not UTF-8"),
        ({"json": b" " * (tar_samples.JSON_BYTES + 1)}, "JSON of more than"),
    ],
)
def test_what_makes_a_sample_unusable(parts, reason):
    with pytest.raises(Unusable, match=reason):
        words(parts)


def test_members_that_are_no_text_are_not_used():
    assert words({"npy": b"\x93NUMPY\0", "pth": b"\xff\xfe", "note": b"a note", "cls": b"3"}).used == ("note", "cls")


def members_of(names):
    return [reader.Member(name, 512 * i, 512 * i + 512, 1) for i, name in enumerate(names)]


def lines_run(names):
    """How many lines of data/tar/samples.py it takes to join members: work, whatever the machine."""
    members, lines = members_of(names), 0

    def within(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return within

    def trace(frame, event, argument):
        return within if frame.f_code.co_filename == tar_samples.__file__ else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = tar_samples.joined(members, USUAL, {})
    finally:
        sys.settrace(before)
    return found, lines


PATTERNS = {
    "one stem for all": ("img.{}.png", "img.{}.txt"),
    "in turns with another": ("a.{}.png", "b.{}.png", "a.{}.txt", "b.{}.txt"),
    "many extensions": ("a.{}",),
}


@pytest.mark.parametrize("patterns", PATTERNS.values(), ids=PATTERNS)
def test_joining_takes_work_in_proportion_to_the_members(patterns):
    few, many = (
        lines_run([pattern.format(f"{i:06}") for i in range(n) for pattern in patterns] + ["a.png"]) for n in (100, 400)
    )
    assert len(many[0]) == 1 + 400 * sum(pattern.endswith("png") for pattern in patterns)
    assert many[1] < 5 * few[1]


def test_a_member_belongs_to_the_image_with_the_longest_name_that_begins_its_own():
    draw = random.Random(0)
    for _ in range(300):
        stems = {".".join(draw.choices("ab", k=draw.randrange(4))) for _ in range(draw.randrange(6))}
        name = ".".join(draw.choices("ab", k=draw.randrange(1, 6)))
        inside = [stem for stem in stems if not stem or name.startswith(f"{stem}.")]
        assert tar_samples._owner(name, stems) == max(inside, key=len, default=None)


def test_an_image_with_too_many_members_is_left_out_and_the_others_are_not(tmp_path):
    many = [(f"a.e{i}", b"text") for i in range(tar_samples.PARTS_LIMIT + 1)]
    path = tars.write(tmp_path / "a.tar", [("a.jpg", tars.jpeg(0)), *many, *tars.sample("b", 1)])
    index = tar_index.build(path, "a.tar", USUAL)
    assert index.column("key").to_pylist() == ["b"]
    (reason,) = index.about.left_out
    assert (reason, index.about.left_out[reason]["examples"]) == (
        "image with more than 256 members of its name",
        ["a.tar: a.jpg"],
    )


def test_a_shard_with_too_many_extensions_keeps_its_first_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(tar_index, "NAMES_LIMIT", 4)
    files = [file for i in range(9) for file in ((f"{i}.jpg", tars.jpeg(i)), (f"{i}.t{i}", b"text"))]
    index = tar_index.build(tars.write(tmp_path / "a.tar", files), "a.tar", USUAL)
    assert index.column("key").to_pylist() == ["0", "1", "2", "3", "4"]
    assert index.about.left_out["sample behind 4 different extensions in its shard"]["count"] == 4


def test_a_name_that_no_file_system_has_is_counted():
    counts = {}
    found = tar_samples.joined(members_of(["b.jpg", "a" * 5000 + ".jpg"]), USUAL, counts)
    assert [sample.key for sample in found] == ["b"]
    assert {reason: entry["count"] for reason, entry in counts.items()} == {
        "member with a name of more than 4,096 letters": 1
    }


def test_extensions_that_are_not_utf_8_are_members_with_escaped_names():
    assert joined("a.jpg", "a.txt", "a.m\udcff")[0] == {"a": {"": "a.jpg", "txt": "a.txt", "m\\xff": "a.m\udcff"}}


def test_strings_of_json_that_are_no_text():
    half = json.dumps({"caption": "\ud83d cat"}).encode()
    with pytest.raises(Unusable, match="no text"):
        words({"json": half})
    assert words({"json": half, "txt": b"a cat"}).texts == {"text": "a cat", "txt": "a cat"}
    other = {"caption": "a cat", "url": "\ud83d", "l\ud83d": "x", "list": ["\ud83d"]}
    found = words({"json": json.dumps(other).encode()})
    assert found.texts == {"caption": "a cat", "text": "a cat", "l?": "x"}
    assert found.metadata == {"caption": "a cat", "url": "?", "l?": "x", "list": ["?"]}
