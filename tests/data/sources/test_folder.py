"""A folder of pictures: what is found, what is left out and counted, and what is refused with words that help."""

import errno
import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from daguerre.data import decode, headers
from daguerre.data.folder_scan import sample_id
from daguerre.data.sources import folder
from daguerre.errors import UserError


def opened(path, split="train", **given):
    return folder.open_source(
        folder.Settings(path=str(path), **{"resolution": 16, "held_out_fraction": 0, **given}), split
    )


def picture(path, side=32):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((side, side, 3), 90, np.uint8)).save(path)
    return path


def captioned(path, text="a picture"):
    picture(path)
    path.with_suffix(".txt").write_text(text, encoding="utf-8")
    return path


def keys(source):
    return [source.record(i).key for i in range(source.count)]


def counts(source):
    return {reason: (entry["count"], entry["examples"]) for reason, entry in source.report().items()}


def test_captions_beside(pictures):
    source = opened(pictures)
    assert keys(source) == [f"{i:03}.{('jpg', 'png', 'webp')[i % 3]}" for i in range(12)]
    assert [source.record(i).texts["text"] for i in range(3)] == ["picture 0", "picture 1", "picture 2"]
    assert source.report() == {}


def test_folders_inside_upper_case_and_hidden_files(tmp_path):
    for name in ("b/c.png", "b/a.JPG", "A.jpeg", "z.webp", ".hidden/x.png", "b/._a.png"):
        captioned(tmp_path / name)
    (tmp_path / "README.md").write_text("about")
    source = opened(tmp_path)
    assert keys(source) == ["A.jpeg", "z.webp", "b/a.JPG", "b/c.png"]
    assert source.report() == {}


def test_metadata_jsonl(tmp_path):
    for name in ("a.png", "in/b.png", "c.png"):
        picture(tmp_path / name)
    lines = [
        {"file_name": "a.png", "text": " an a ", "artist": "x"},
        {"file_name": "./in/b.png", "text": "ein schönes b"},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), "utf-8")
    (tmp_path / "c.txt").write_text("from beside")
    source = opened(tmp_path)
    assert {r.key: r.texts["text"] for r in map(source.record, range(3))} == {
        "a.png": "an a",
        "in/b.png": "ein schönes b",
        "c.png": "from beside",
    }
    assert source.record(0).metadata == {"artist": "x"}


def test_metadata_lines_that_cannot_be_used_are_counted(tmp_path):
    captioned(tmp_path / "good.png")
    picture(tmp_path / "a.png")
    lines = [
        b"",
        b'{"file_name": "a.png", "text": "one"}',
        b'{"file_name": "a.png"',
        b'["a.png", "text"]',
        b'{"file_name": "a.png"}',
        b'{"file_name": "a.png", "text": 5}',
        b'{"file_name": "a.png", "text": "caf\xe9"}',
        b'{"file_name": "gone.png", "text": "x"}',
        b'{"file_name": "../good.png", "text": "x"}',
        b'{"file_name": "a.png", "text": "two"}',
    ]
    (tmp_path / "metadata.jsonl").write_bytes(b"\r\n".join(lines))
    source = opened(tmp_path)
    assert source.record(0).texts["text"] == "one"
    found = counts(source)
    count, examples = found["line of metadata.jsonl that cannot be used"]
    assert count == 5
    assert [e.split(":")[0] for e in examples] == [f"metadata.jsonl line {n}" for n in (3, 4, 5, 6, 7)]
    assert "no UTF-8" in examples[-1]
    assert found["picture named in metadata.jsonl that is not in the folder"][0] == 2
    assert found["duplicate: picture named twice in metadata.jsonl"] == (1, ["metadata.jsonl line 10: a.png"])


def test_everything_left_out_has_a_reason_and_a_name(tmp_path):
    captioned(tmp_path / "good.png")
    picture(tmp_path / "lonely.png")
    captioned(tmp_path / "latin.png").with_suffix(".txt").write_bytes(b"caf\xe9")
    captioned(tmp_path / "blank.png", " \n")
    captioned(tmp_path / "zero.png").write_bytes(b"")
    captioned(tmp_path / "page.jpg").write_text("<html>")
    cut = captioned(tmp_path / "cut.png")
    cut.write_bytes(cut.read_bytes()[:20])
    picture(tmp_path / "moving.gif")
    (tmp_path / "orphan.txt").write_text("a caption without a picture")
    (tmp_path / "dangling.jpg").symlink_to(tmp_path / "nowhere.jpg")
    os.mkfifo(tmp_path / "pipe.png")
    source = opened(tmp_path)
    assert keys(source) == ["good.png"]
    assert counts(source) == {
        "picture without a caption": (1, ["lonely.png"]),
        "caption file that is not UTF-8": (1, ["latin.txt"]),
        "caption file without text": (1, ["blank.txt"]),
        "empty file": (1, ["zero.png"]),
        "not an image (JPEG, PNG and WebP can be read)": (1, ["page.jpg"]),
        "broken image": (1, ["cut.png"]),
        "picture in a format that is not read (JPEG, PNG and WebP are)": (1, ["moving.gif"]),
        "text file without a picture of that name": (1, ["orphan.txt"]),
        "link that leads nowhere, or no regular file": (2, ["dangling.jpg", "pipe.png"]),
    }


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_counted(tmp_path):
    captioned(tmp_path / "good.png")
    captioned(tmp_path / "locked.png").chmod(0)
    captioned(tmp_path / "in" / "x.png").parent.chmod(0)
    found = counts(opened(tmp_path))
    (tmp_path / "in").chmod(0o700)
    assert found == {"file that may not be read": (1, ["locked.png"]), "folder that may not be read": (1, ["in"])}


def test_a_fault_of_the_disk_is_no_reason_to_leave_a_picture_out(tmp_path, monkeypatch):
    captioned(tmp_path / "good.png")

    def faulty(file):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(headers.PngImagePlugin, "PngImageFile", faulty)
    with pytest.raises(OSError, match="Input/output error"):
        opened(tmp_path)


def test_links_are_followed_but_nothing_is_taken_twice(tmp_path):
    inside = tmp_path / "set"
    captioned(inside / "a.png")
    captioned(tmp_path / "elsewhere" / "b.png")
    (inside / "linked").symlink_to(tmp_path / "elsewhere")
    (inside / "loop").symlink_to(inside)
    (inside / "same.png").symlink_to(inside / "a.png")
    (inside / "same.txt").write_text("twice")
    source = opened(inside)
    assert keys(source) == ["a.png", "linked/b.png"]
    assert counts(source)["folder reached a second time by a link"] == (1, ["loop"])
    assert counts(source)["duplicate: a link to a picture that is already there"] == (1, ["same.png"])


def test_small_pictures_are_kept_and_noted(tmp_path):
    captioned(tmp_path / "a.png")
    source = opened(tmp_path, resolution=64)
    assert source.count == 1
    entry = source.report()["kept, but enlarged: shorter side under 64 px"]
    assert (entry["count"], entry["kept"]) == (1, True)


def test_a_name_that_is_no_utf8(tmp_path):
    captioned(tmp_path / os.fsdecode(b"caf\xe9.png"))
    source = opened(tmp_path)
    assert source.record(0).key == "caf\\udce9.png"
    json.dumps(source.record(0).key).encode()


def test_ids_hang_on_the_path_alone(pictures, tmp_path):
    before = opened(pictures)
    moved = shutil.copytree(pictures, tmp_path / "moved")
    captioned(moved / "000-new.png")
    after = opened(moved)
    ids = {after.record(i).key: after.sample_id(i) for i in range(after.count)}
    assert all(ids[before.record(i).key] == before.sample_id(i) for i in range(before.count))
    assert before.sample_id(0) == sample_id("000.jpg") == 6549008113065538135


def test_the_split_is_stable_and_near_its_share(tmp_path):
    source = picture(tmp_path / "one.png")
    inside = tmp_path / "many"
    inside.mkdir()
    for i in range(300):
        shutil.copy(source, inside / f"{i}.png")
        (inside / f"{i}.txt").write_text("x")
    held_out = set(keys(opened(inside, "held_out", held_out_fraction=0.2)))
    train = set(keys(opened(inside, "train", held_out_fraction=0.2)))
    assert 40 <= len(held_out) <= 80
    assert len(train | held_out) == 300
    for i in range(0, 300, 2):
        (inside / f"{i}.png").unlink()
    assert set(keys(opened(inside, "held_out", held_out_fraction=0.2))) <= held_out


@pytest.mark.parametrize(("number", "fraction", "held_out"), [(1, 0.5, 0), (2, 0.001, 1), (2, 0.5, 1), (5, 0.0, 0)])
def test_each_split_has_a_sample_where_there_are_two(tmp_path, number, fraction, held_out):
    for i in range(number):
        captioned(tmp_path / f"{i}.png")
    assert opened(tmp_path, "held_out", held_out_fraction=fraction).count == held_out
    assert opened(tmp_path, "train", held_out_fraction=fraction).count == number - held_out


def test_a_path_that_is_no_folder(tmp_path):
    with pytest.raises(UserError, match=r"data\.path: .*nope' does not exist(.|\n)*cat\.txt"):
        opened(tmp_path / "nope")
    with pytest.raises(UserError, match="is not a folder"):
        opened(picture(tmp_path / "a.png"))
    with pytest.raises(ValidationError):
        folder.Settings(path="")


def test_an_empty_folder(tmp_path):
    with pytest.raises(UserError, match=r"there is no JPEG, PNG or WebP file in (.|\n)*metadata\.jsonl"):
        opened(tmp_path)


def test_a_folder_of_other_formats_says_so(tmp_path):
    picture(tmp_path / "a.gif")
    with pytest.raises(UserError, match=r"no JPEG, PNG or WebP(.|\n)*format that is not read.*a\.gif"):
        opened(tmp_path)


def test_pictures_without_any_caption(tmp_path):
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    with pytest.raises(UserError, match=r"none of the 2 pictures .* has a caption\. .*a\.png belongs into a\.txt"):
        opened(tmp_path)


def test_nothing_usable_lists_the_reasons(tmp_path):
    picture(tmp_path / "a.png")
    captioned(tmp_path / "b.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"none of the 2 pictures(.|\n)*empty file: b\.png"):
        opened(tmp_path)


def test_deep_damage_shows_when_decoded(tmp_path):
    path = captioned(tmp_path / "a.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:5000])
    source = opened(tmp_path)
    assert source.count == 1
    with pytest.raises(decode.Undecodable):
        decode.pixels(source.record(0).image)
