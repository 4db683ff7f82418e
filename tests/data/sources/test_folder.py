"""A folder of images: what is found, what is left out and counted, and what is refused with words that help."""

import errno
import json
import os
import shutil
import socket
import unicodedata

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from daguerre.data.dataset import open_dataset
from daguerre.data.folder import scan
from daguerre.data.folder.scan import sample_id
from daguerre.data.images import decode, headers
from daguerre.data.leftovers import LEFTOVER
from daguerre.data.sources import folder
from daguerre.errors import UserError
from daguerre.settings import ROOTS
from daguerre.storage import roots


def settings(path, **given):
    return folder.Settings(path=str(path), **{"resolution": 16, **given})


def opened(path, **given):
    return folder.open_source(settings(path, **given), "train")


def chosen(path, split, **given):
    """Names of the samples of one split."""
    data = open_dataset(settings(path, **given), split)
    return [data.members[0].source.name(i) for i in data.selections[0].numbers.tolist()]


def write_image(path, side=32):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((side, side, 3), 90, np.uint8)).save(path)
    return path


def captioned(path, text="an image"):
    write_image(path)
    path.with_suffix(".txt").write_text(text, encoding="utf-8")
    return path


def records(source):
    return [source.record(i) for i in range(source.index.count)]


def keys(source):
    return [record.key for record in records(source)]


def counts(source):
    return {reason: (entry["count"], entry["examples"]) for reason, entry in source.report().items()}


def test_captions_beside(image_folder):
    source = opened(image_folder)
    assert keys(source) == [f"{i:03}.{('jpg', 'png', 'webp')[i % 3]}" for i in range(12)]
    assert [source.record(i).texts["text"] for i in range(3)] == ["image 0", "image 1", "image 2"]
    assert source.report() == {}


def test_caption_files_of_kohya(tmp_path):
    for name in ("a.png", "b.png"):
        write_image(tmp_path / name).with_suffix(".caption").write_text(f"tags of {name}")
    (tmp_path / "b.txt").write_text("the text counts")
    source = opened(tmp_path)
    assert [record.texts["text"] for record in records(source)] == ["tags of a.png", "the text counts"]
    (tmp_path / "a.caption").write_text("other tags")
    assert records(opened(tmp_path))[0].texts["text"] == "other tags"


def test_folders_inside_upper_case_and_hidden_files(tmp_path):
    for name in ("b/c.png", "b/a.JPG", "A.jpeg", "z.webp", ".hidden/x.png", "b/._a.png"):
        captioned(tmp_path / name)
    (tmp_path / "README.md").write_text("about")
    source = opened(tmp_path)
    assert keys(source) == ["A.jpeg", "z.webp", "b/a.JPG", "b/c.png"]
    assert counts(source) == {LEFTOVER: (3, [".hidden/", "b/._a.png", "b/._a.txt"])}


LEFT = (
    "__MACOSX/a/._x.png", "@eaDir/a.png/SYNOPHOTO_THUMB_XL.jpg", "#recycle/old.png", ".thumbnails/a.png", "Thumbs.db",
    ".ipynb_checkpoints/a-checkpoint.png", "desktop.ini", ".DS_Store", "a.npz", "a_0016x0016_sd.npz",
    "_latent_cache/a.safetensors", "a_te.safetensors", "._a.png", "$RECYCLE.BIN/x.png", ".aitk_size.json",
    "_controls/a.pose.jpg", "@Recycle/old.png", "@Recently-Snapshot/a/a.png", "RECYCLER/x.png",
    "_gsdata_/_saved_/a.png", "Network Trash Folder/x.png",
)  # fmt: skip


def test_what_programs_leave_beside_pictures_is_left_out(tmp_path):
    captioned(tmp_path / "a.png")
    for name in LEFT:
        captioned(tmp_path / name) if name.endswith((".png", ".jpg")) else None
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    source = opened(tmp_path)
    assert keys(source) == ["a.png"]
    (reason,) = source.report()
    assert reason == LEFTOVER
    assert source.report()[reason]["damage"] is False


def test_the_picture_of_eagle_is_trained_and_its_small_copy_is_not(tmp_path):
    captioned(tmp_path / "K1.info" / "a.png")
    write_image(tmp_path / "K1.info" / "a_thumbnail.png")
    captioned(tmp_path / "b_thumbnail.png")  # not beside a picture of Eagle's
    assert keys(opened(tmp_path)) == ["b_thumbnail.png", "K1.info/a.png"]


def test_links_lead_a_queued_run_no_further_than_its_folders(tmp_path, monkeypatch):
    """A link in the folder to a picture, a folder or masks elsewhere is left out and counted, and others are read."""
    captioned(tmp_path / "mine" / "a.png")
    captioned(tmp_path / "mine" / "b" / "b.png")
    for name in ("secret", "secrets/inner/secret"):
        captioned(tmp_path / "theirs" / f"{name}.png")
    (tmp_path / "mine" / "l.png").symlink_to(tmp_path / "theirs" / "secret.png")
    (tmp_path / "mine" / "l.txt").symlink_to(tmp_path / "theirs" / "secret.txt")
    (tmp_path / "mine" / "folder").symlink_to(tmp_path / "theirs" / "secrets")
    (tmp_path / "mine" / "to_b").symlink_to(tmp_path / "mine" / "b")
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "a.png").symlink_to(tmp_path / "theirs" / "secret.png")
    assert len(keys(opened(tmp_path / "mine"))) == 4
    monkeypatch.setenv(ROOTS, json.dumps([str(tmp_path / "mine"), str(tmp_path / "masks")]))
    source = opened(tmp_path / "mine", mask_dir=str(tmp_path / "masks"), captions={"text": "a"})
    assert keys(source) == ["a.png", "b/b.png"]
    assert counts(source)[roots.AWAY] == (3, ["l.png", "l.txt", "folder"])
    assert [record.images.keys() for record in records(source)] == [{"image"}, {"image"}]


def test_labels_of_onetrainer_are_no_pictures(tmp_path):
    captioned(tmp_path / "a.png")
    for name in ("a-masklabel.png", "a-condlabel.png"):
        write_image(tmp_path / name)
    source = opened(tmp_path)
    assert keys(source) == ["a.png"]
    assert source.record(0).images.keys() == {"image", "mask", "control"}


def test_a_flat_folder(tmp_path):
    for name in ("a.png", "rejected/b.png", "rejected/deep/c.png", "masks/a.png"):
        captioned(tmp_path / name)
    assert len(keys(opened(tmp_path))) == 4
    source = opened(tmp_path, recursive=False, mask_dir=str(tmp_path / "masks"))
    assert keys(source) == ["a.png"]
    assert counts(source) == {"folder inside that is not read (data.recursive=false)": (1, ["rejected/"])}


@pytest.mark.parametrize("name", ["a.TXT", "a.png.txt", "a.Caption", "a.tags", "a.png.tags"])
def test_names_of_caption_files(tmp_path, name):
    write_image(tmp_path / "a.png")
    (tmp_path / name).write_text("words")
    source = opened(tmp_path)
    assert source.record(0).texts == {"text": "words"}
    assert source.report() == {}
    before = source.index_path
    (tmp_path / name).write_text("other words")
    assert opened(tmp_path).record(0).texts == {"text": "other words"}
    assert opened(tmp_path).index_path != before


def test_a_second_caption_file_is_said_and_another_ending_may_be_asked_for(tmp_path):
    write_image(tmp_path / "a.png")
    for ending in ("txt", "caption", "wd14"):
        (tmp_path / f"a.{ending}").write_text(ending)
    source = opened(tmp_path)
    assert source.record(0).texts["text"] == "txt"
    assert counts(source) == {"kept, but a second text file of the image is not read": (1, ["a.caption"])}
    source = opened(tmp_path, caption_extension=".wd14")
    assert source.record(0).texts["text"] == "wd14"
    (tmp_path / "a.wd14").unlink()
    with pytest.raises(UserError, match=r"goes into a\.wd14(.|\n)*1 \.caption, 1 \.txt; captions in files"):
        opened(tmp_path, caption_extension=".wd14")


def test_a_caption_file_beside_a_line_of_metadata_is_said(tmp_path):
    for name in ("a", "b"):
        write_image(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("beside")
    beside(tmp_path / "metadata.jsonl", {"file_name": "a.png", "text": "listed"})
    source = opened(tmp_path)
    assert [record.texts["text"] for record in records(source)] == ["listed", "beside"]
    assert counts(source) == {"kept, but a second text file of the image is not read": (1, ["a.txt"])}


def test_repeats_in_names_of_folders_are_said_to_repeat_nothing(tmp_path):
    for name in ("10_sks dog/a.png", "1_cat/b.png", "2024/c.png", "00001_x/d.png", "plain/3_e/e.png", "4_f.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        captioned(tmp_path / name)
    source = opened(tmp_path)
    assert len(keys(source)) == 6
    assert counts(source) == {scan.REPEATED: (2, ["10_sks dog/", "1_cat/"])}
    assert counts(opened(tmp_path, captions_from="folder_names", recursive=True)).keys() == {
        "image outside of the folders whose names are the captions",
        "kept, but its text file is ignored (data.captions_from=folder_names)",
    }


@pytest.mark.parametrize("on_disk", ["NFC", "NFD"])
def test_a_line_names_an_image_in_either_form_of_unicode(tmp_path, on_disk):
    """Files from macOS have two characters for an accented letter, lines written elsewhere one."""
    (tmp_path / "größe").mkdir()
    name = unicodedata.normalize(on_disk, "größe/café.png")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    write_image(tmp_path / name)
    other = unicodedata.normalize("NFD" if on_disk == "NFC" else "NFC", "größe/café.png")
    beside(tmp_path / "metadata.jsonl", {"file_name": other, "text": "coffee"})
    assert [record.texts["text"] for record in records(opened(tmp_path))] == ["coffee"]


@pytest.mark.parametrize("ending", ["jfif", "JFIF", "jpe"])
def test_other_endings_of_jpegs(tmp_path, ending):
    Image.fromarray(np.full((32, 32, 3), 9, np.uint8)).save(tmp_path / f"a.{ending}", format="JPEG")
    (tmp_path / "a.txt").write_text("an a")
    assert keys(opened(tmp_path)) == [f"a.{ending}"]


def test_a_metadata_jsonl_of_each_folder_in_other_peoples_words(tmp_path):
    for name in ("train/a.png", "train/in/b.png", "c.png", "d.png"):
        write_image(tmp_path / name)
    beside(tmp_path / "train/metadata.jsonl", {"image": "a.png", "prompt": "an a"})
    with (tmp_path / "train/metadata.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"file_name": "in\\b.png", "caption": "a b", "score": 2}))
    beside(tmp_path / "metadata.jsonl", {"path": "c.png", "text": ["one c", "two c"]})
    (tmp_path / "metadata.csv").write_text("file_name,text\nd.png,a d\n")
    source = opened(tmp_path)
    found = {record.key: (record.texts, record.metadata) for record in records(source)}
    assert found["train/a.png"][0]["text"] == "an a"
    assert found["train/in/b.png"] == ({"text": "a b", "caption": "a b"}, {"caption": "a b", "score": 2})
    assert found["c.png"][0] == {"text": "one c", "text.1": "two c"}
    assert counts(source) == {"image without a caption": (1, ["d.png"])}


def test_lines_that_name_no_image_are_in_the_refusal(tmp_path):
    write_image(tmp_path / "a.png")
    beside(tmp_path / "metadata.jsonl", {"file_name": "b\\a.png", "text": "an a"})
    (tmp_path / "captions.csv").write_text("file_name,text\na.png,an a\n")
    with pytest.raises(UserError) as refused:
        opened(tmp_path)
    assert "1  image named in metadata.jsonl that is not in the folder: metadata.jsonl line 1: b\\a.png" in str(
        refused.value
    )
    assert "Other files that are there: 1 .csv; a table such as captions.csv" in str(refused.value)


def test_a_field_that_no_sample_has_is_refused(tmp_path):
    write_image(tmp_path / "a.png")
    write_image(tmp_path / "b.png")
    lines = [{"file_name": "a.png", "text": "an a"}, {"file_name": "b.png", "text": "a b", "long": "a long b"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(UserError, match=r"no sample has text in short\. Fields with text: long, text\."):
        open_dataset(settings(tmp_path, captions={"fields": ("text", "short")}), "train")
    assert open_dataset(settings(tmp_path, captions={"fields": ("text", "long")}), "train").size


def test_no_pipe_of_a_folder_is_opened(tmp_path):
    captioned(tmp_path / "a.png")
    (tmp_path / "masks").mkdir()
    for name in ("a.caption", "a.json", "metadata.jsonl", "masks/a.png", "b.png", "b.txt"):
        os.mkfifo(tmp_path / name)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "c.png"))
    source = opened(tmp_path, mask_dir=str(tmp_path / "masks"))
    assert keys(source) == ["a.png"]
    assert counts(source)["link that leads nowhere, or no regular file"][0] == 6
    assert source.record(0).images.keys() == {"image"}


def test_metadata_jsonl(tmp_path):
    for name in ("a.png", "in/b.png", "c.png"):
        write_image(tmp_path / name)
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
    write_image(tmp_path / "a.png")
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
    assert found["image named in metadata.jsonl that is not in the folder"][0] == 2
    assert found["duplicate: image named twice in metadata.jsonl"] == (1, ["metadata.jsonl line 10: a.png"])


def test_everything_left_out_has_a_reason_and_a_name(tmp_path):
    captioned(tmp_path / "good.png")
    write_image(tmp_path / "lonely.png")
    captioned(tmp_path / "latin.png").with_suffix(".txt").write_bytes(b"caf\xe9")
    captioned(tmp_path / "blank.png", " \n")
    captioned(tmp_path / "zero.png").write_bytes(b"")
    captioned(tmp_path / "page.jpg").write_text("<html>")
    cut = captioned(tmp_path / "cut.png")
    cut.write_bytes(cut.read_bytes()[:20])
    write_image(tmp_path / "moving.gif")
    (tmp_path / "orphan.txt").write_text("a caption without an image")
    (tmp_path / "dangling.jpg").symlink_to(tmp_path / "nowhere.jpg")
    os.mkfifo(tmp_path / "pipe.png")
    source = opened(tmp_path)
    assert keys(source) == ["good.png"]
    assert counts(source) == {
        "image without a caption": (1, ["lonely.png"]),
        "caption file that is not UTF-8": (1, ["latin.txt"]),
        "caption file without text": (1, ["blank.txt"]),
        "empty file": (1, ["zero.png"]),
        "not an image (JPEG, PNG and WebP can be read)": (1, ["page.jpg"]),
        "broken image": (1, ["cut.png"]),
        "image in a format that is not read (JPEG, PNG and WebP are)": (1, ["moving.gif"]),
        "text file without an image of that name": (1, ["orphan.txt"]),
        "link that leads nowhere, or no regular file": (2, ["dangling.jpg", "pipe.png"]),
    }


def test_what_has_no_caption_is_no_damage(tmp_path):
    """It is left out and counted, and stops no run."""
    for i in range(40):
        (captioned if i % 2 else write_image)(tmp_path / f"{i}.png")
        (tmp_path / f"orphan{i}.txt").write_text("x")
    (tmp_path / "1.txt").write_text(" ")
    data = open_dataset(settings(tmp_path), "train")
    assert data.report()["image without a caption"]["count"] == 20
    for i in range(1, 40, 2):
        (tmp_path / f"{i}.png").write_bytes(b"<html>" if i % 4 == 1 else (tmp_path / f"{i}.png").read_bytes())
    with pytest.raises(UserError, match=r"10 of 20 samples cannot be used(.|\n)*not an image"):
        open_dataset(settings(tmp_path), "train")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_counted(tmp_path):
    captioned(tmp_path / "good.png")
    captioned(tmp_path / "locked.png").chmod(0)
    captioned(tmp_path / "in" / "x.png").parent.chmod(0)
    found = counts(opened(tmp_path))
    (tmp_path / "in").chmod(0o700)
    assert found == {
        "file without read permission": (1, ["locked.png"]),
        "folder that cannot be read: permission denied": (1, ["in"]),
    }


def test_a_fault_of_the_disk_is_no_reason_to_leave_an_image_out(tmp_path, monkeypatch):
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
    assert counts(source)["duplicate: a link to an image that is already there"] == (1, ["same.png"])


def test_small_images_are_kept_and_noted(tmp_path):
    captioned(tmp_path / "a.png")
    data = open_dataset(settings(tmp_path, resolution=64), "train")
    assert data.size == 1
    (entry,) = [entry for reason, entry in data.report().items() if "kept, but enlarged" in reason]
    assert (entry["count"], entry["kept"]) == (1, True)


def test_a_name_that_is_no_utf8(tmp_path):
    captioned(tmp_path / os.fsdecode(b"caf\xe9.png"))
    source = opened(tmp_path)
    assert source.record(0).key == "caf\\udce9.png"
    json.dumps(source.record(0).key).encode()


def test_ids_hang_on_the_path_alone(image_folder, tmp_path):
    before = opened(image_folder)
    moved = shutil.copytree(image_folder, tmp_path / "moved")
    captioned(moved / "000-new.png")
    after = opened(moved)
    ids = {after.record(i).key: after.sample_id(i) for i in range(after.index.count)}
    assert all(ids[before.record(i).key] == before.sample_id(i) for i in range(before.index.count))
    assert before.sample_id(0) == sample_id("000.jpg") == 6549008113065538135


def test_the_split_is_stable_and_near_its_share(tmp_path):
    source = write_image(tmp_path / "one.png")
    inside = tmp_path / "many"
    inside.mkdir()
    for i in range(300):
        shutil.copy(source, inside / f"{i}.png")
        (inside / f"{i}.txt").write_text("x")
    held_out = set(chosen(inside, "held_out", held_out_fraction=0.2))
    train = set(chosen(inside, "train", held_out_fraction=0.2))
    assert 40 <= len(held_out) <= 80
    assert len(train | held_out) == 300
    for i in range(0, 300, 2):
        (inside / f"{i}.png").unlink()
    assert set(chosen(inside, "held_out", held_out_fraction=0.2)) <= held_out


@pytest.mark.parametrize(("number", "fraction", "held_out"), [(1, 0.5, 0), (2, 0.001, 1), (2, 0.5, 1), (5, 0.0, 0)])
def test_each_split_has_a_sample_where_there_are_two(tmp_path, number, fraction, held_out):
    for i in range(number):
        captioned(tmp_path / f"{i}.png")
    assert len(chosen(tmp_path, "held_out", held_out_fraction=fraction)) == held_out
    assert len(chosen(tmp_path, "train", held_out_fraction=fraction)) == number - held_out


def test_a_path_that_is_no_folder(tmp_path):
    with pytest.raises(UserError, match=r"data\.path: .*nope' does not exist(.|\n)*cat\.txt"):
        opened(tmp_path / "nope")
    with pytest.raises(UserError, match="is not a folder"):
        opened(write_image(tmp_path / "a.png"))
    with pytest.raises(ValidationError):
        folder.Settings(path="")


def test_an_empty_folder(tmp_path):
    with pytest.raises(UserError, match=r"there is no JPEG, PNG or WebP file in (.|\n)*metadata\.jsonl"):
        opened(tmp_path)


def test_a_folder_of_other_formats_says_so(tmp_path):
    write_image(tmp_path / "a.gif")
    with pytest.raises(UserError, match=r"no JPEG, PNG or WebP(.|\n)*format that is not read.*a\.gif"):
        opened(tmp_path)


def test_images_without_any_caption(tmp_path):
    write_image(tmp_path / "a.png")
    write_image(tmp_path / "b.png")
    with pytest.raises(UserError, match=r"none of the 2 images .* has a caption\. .*a\.png goes into a\.txt"):
        opened(tmp_path)


def test_nothing_usable_lists_the_reasons(tmp_path):
    write_image(tmp_path / "a.png")
    captioned(tmp_path / "b.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"none of the 2 images(.|\n)*empty file: b\.png"):
        opened(tmp_path)


def test_deep_damage_shows_when_decoded(tmp_path):
    path = captioned(tmp_path / "a.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:5000])
    source = opened(tmp_path)
    assert source.index.count == 1
    with pytest.raises(decode.Undecodable):
        decode.sized(source.record(0).image, settings(tmp_path), None)


def beside(path, document):
    path.write_text(json.dumps(document), encoding="utf-8")


def test_img2dataset_files(tmp_path):
    """.jpg, .txt and .json beside each other, as its output format `files` writes them."""
    write_image(tmp_path / "00000" / "000000000.jpg")
    (tmp_path / "00000" / "000000000.txt").write_text("a cat")
    about = {
        "caption": "a cat",
        "url": "http://x/1.jpg",
        "status": "success",
        "width": 32,
        "exif": "{}",
        "similarity": 0.3,
    }
    beside(tmp_path / "00000" / "000000000.json", about)
    write_image(tmp_path / "00000" / "000000001.jpg")
    beside(tmp_path / "00000" / "000000001.json", {"caption": "a dog", "key": "000000001"})
    (tmp_path / "00000_stats.json").write_text("{}")
    source = opened(tmp_path)
    assert source.report() == {}
    assert [r.texts["text"] for r in records(source)] == ["a cat", "a dog"]
    assert source.record(0).texts["url"] == "http://x/1.jpg"
    assert source.record(0).metadata == about
    assert source.index.numbers["similarity"].to_pylist() == [0.3, None]
    assert source.index.texts["status"].to_pylist() == ["success", None]


def test_other_caption_fields(tmp_path):
    for name in "abc":
        write_image(tmp_path / f"{name}.png")
    beside(tmp_path / "a.json", {"alt": "alt of a", "caption": "a"})
    beside(tmp_path / "b.json", {"caption": "b"})
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "c.png", "alt": "alt of c"}')
    source = opened(tmp_path, captions={"fields": ["alt"]})
    assert [(r.key, r.texts["alt"]) for r in records(source)] == [("a.png", "alt of a"), ("c.png", "alt of c")]
    assert counts(source) == {"image without a caption": (1, ["b.png"])}


def test_json_that_holds_no_object_is_counted(tmp_path):
    captioned(tmp_path / "good.png")
    for name, text in (("a", "["), ("b", "[1]"), ("c", '"caf\\'), ("d", "[" * 100_000)):
        captioned(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.json").write_text(text)
    source = opened(tmp_path)
    assert keys(source) == ["good.png"]
    assert counts(source) == {
        "JSON file of an image that is not a JSON object": (4, ["a.json", "b.json", "c.json", "d.json"])
    }


def test_captions_from_file_names(tmp_path):
    for name in ("a_red_fox.png", "a  blue_bird-012.png", "two dogs (3).png", "17.png", "R2D2.png"):
        write_image(tmp_path / name)
    captioned(tmp_path / "with text.png", "not this")
    source = opened(tmp_path, captions_from="file_names")
    assert {r.key: r.texts["text"] for r in records(source)} == {
        "a  blue_bird-012.png": "a blue bird",
        "a_red_fox.png": "a red fox",
        "two dogs (3).png": "two dogs",
        "R2D2.png": "R2D2",
        "with text.png": "with text",
    }
    assert counts(source) == {
        "file name that gives no caption": (1, ["17.png"]),
        "kept, but its text file is ignored (data.captions_from=file_names)": (1, ["with text.txt"]),
    }


def test_captions_from_folder_names(tmp_path):
    for name in ("tabby_cat/1.png", "dog/2.png", "outside.png", "animals/dog/3.png"):
        write_image(tmp_path / name)
    source = opened(tmp_path, captions_from="folder_names")
    assert [(r.key, r.texts["text"]) for r in records(source)] == [
        ("animals/dog/3.png", "dog"),
        ("dog/2.png", "dog"),
        ("tabby_cat/1.png", "tabby cat"),
    ]
    assert counts(source) == {"image outside of the folders whose names are the captions": (1, ["outside.png"])}


@pytest.mark.parametrize("names", [{"n01": "a tench", "n02": "a shark"}, ["a tench", "a shark"]])
def test_folder_names_that_are_classes(tmp_path, names):
    for name in ("n02", "n01"):
        write_image(tmp_path / "train" / name / "x.png")
    source = opened(tmp_path, captions_from="folder_names", idx_to_prompt=names)
    assert [r.texts["text"] for r in records(source)] == ["a tench", "a shark"]


def test_folder_names_by_number(tmp_path):
    for name in ("0", "10", "2"):
        write_image(tmp_path / name / "x.png")
    source = opened(tmp_path, captions_from="folder_names", idx_to_prompt=[f"class {i}" for i in range(11)])
    assert [r.texts["text"] for r in records(source)] == ["class 0", "class 10", "class 2"]


@pytest.mark.parametrize("names", [{"n01": "a tench"}, ["a tench"], ["a tench", "a shark", "a ray"], "imagenet"])
def test_folder_names_that_are_not_the_classes(tmp_path, names):
    for name in ("n01", "n02"):
        write_image(tmp_path / name / "x.png")
    with pytest.raises(UserError, match=r"data\.idx_to_prompt: [12] of the 2 folders .* are not among the .*n02"):
        opened(tmp_path, captions_from="folder_names", idx_to_prompt=names)


def test_settings_without_effect_are_refused(tmp_path):
    with pytest.raises(ValidationError, match="idx_to_prompt: no effect without captions_from=folder_names"):
        settings(tmp_path, idx_to_prompt=["a"])
    with pytest.raises(ValidationError, match="captions_from: no effect"):
        settings(tmp_path, captions_from="file_names", captions={"fields": ["alt"]})


def test_more_formats_where_they_are_allowed(tmp_path):
    for name in ("a.gif", "b.TIFF", "c.png", "d.bmp"):
        write_image(tmp_path / name).with_suffix(".txt").write_text("x")
    source = opened(tmp_path, formats=["gif", "tiff", "png"])
    assert keys(source) == ["a.gif", "b.TIFF", "c.png"]
    assert counts(source) == {
        "image in a format that is not read (GIF, TIFF and PNG are)": (1, ["d.bmp"]),
        "text file without an image of that name": (1, ["d.txt"]),
    }


def test_sizes_are_those_of_the_upright_image(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (30, 20)).save(tmp_path / "a.jpg", exif=exif)
    Image.new("RGB", (30, 20)).save(tmp_path / "b.jpg")
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("x")
    index = opened(tmp_path).index
    assert (index.heights_px.tolist(), index.widths_px.tolist()) == ([30, 20], [20, 30])


@pytest.fixture
def headers_read(monkeypatch):
    """Files whose headers are read."""
    seen = []
    real = headers.upright_size

    def noted(file, formats):
        seen.append(os.path.basename(file.name))
        return real(file, formats)

    monkeypatch.setattr(scan.headers, "upright_size", noted)
    return seen


def test_a_second_start_reads_no_header(image_folder, headers_read):
    first = opened(image_folder)
    assert len(headers_read) == 12
    headers_read.clear()
    again = opened(image_folder)
    assert headers_read == []
    assert again.index_path == first.index_path
    assert [r.texts for r in records(again)] == [r.texts for r in records(first)]


def test_only_what_changed_is_read_again(image_folder, headers_read):
    before = opened(image_folder)
    texts = {r.key: r.texts["text"] for r in records(before)}
    headers_read.clear()
    (image_folder / "000.txt").write_text("another caption")
    Image.new("RGB", (77, 33)).save(image_folder / "001.png")
    (image_folder / "002.webp").unlink()
    captioned(image_folder / "new.png", "new")
    after = opened(image_folder)
    assert sorted(headers_read) == ["000.jpg", "001.png", "new.png"]
    expected = {**texts, "000.jpg": "another caption", "new.png": "new"}
    del expected["002.webp"]
    assert {r.key: r.texts["text"] for r in records(after)} == expected
    at = keys(after).index("001.png")
    assert (after.index.heights_px[at], after.index.widths_px[at]) == (33, 77)
    assert before.record(0).texts["text"] == "image 0"  # a run that goes on is not disturbed


def test_a_caption_edited_in_place_is_seen(image_folder, headers_read):
    before = opened(image_folder)
    headers_read.clear()
    caption, image = image_folder / "000.txt", image_folder / "001.png"
    stats = {path: path.stat() for path in (caption, image)}
    assert caption.read_text() == "image 0\n"
    caption.write_text("egami 0\n")
    image.chmod(0o600)
    for path, stat in stats.items():
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = opened(image_folder)
    assert sorted(headers_read) == ["000.jpg", "001.png"]
    assert after.record(0).texts["text"] == "egami 0"
    assert after.index.ids.tolist() == before.index.ids.tolist()
    headers_read.clear()
    assert opened(image_folder).index_path == after.index_path
    assert headers_read == []


def test_a_changed_line_of_metadata_is_seen(tmp_path):
    write_image(tmp_path / "a.png")
    for text in ("one", "two"):
        beside(tmp_path / "metadata.jsonl", {"file_name": "a.png", "text": text})
        assert opened(tmp_path).record(0).texts["text"] == text


def test_other_settings_have_another_index(image_folder):
    write_image(image_folder / "only_a_name.png")
    assert opened(image_folder).index.count == 12
    assert opened(image_folder, captions_from="file_names").index.count == 1
    assert opened(image_folder).index.count == 12


def test_a_damaged_index_is_made_again(image_folder):
    first = opened(image_folder)
    first.index_path.write_bytes(first.index_path.read_bytes()[:-100])
    assert opened(image_folder).index.ids.tolist() == opened(image_folder).index.ids.tolist()
    assert opened(image_folder).index.count == 12


def test_old_states_are_forgotten(tmp_path):
    found = []
    for i in range(8):
        captioned(tmp_path / f"{i}.png")
        found.append(opened(tmp_path).index_path)
    assert [path.exists() for path in found] == [False] * 4 + [True] * 4


def test_a_cache_folder_that_cannot_be_made(image_folder, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"data\.cache_dir: .*is not writable"):
        opened(image_folder, cache_dir=str(tmp_path / "file"))


def test_a_sample_is_a_shard_of_its_own_so_that_the_order_is_mixed(image_folder):
    assert opened(image_folder).index.shard_starts.tolist() == list(range(13))


def test_fields_that_may_be_the_captions_are_named(tmp_path):
    """As gallery-dl and Google write a JSON file for each picture, and as the hub's examples name a column."""
    for name in "ab":
        write_image(tmp_path / "json" / f"{name}.png")
        about = {"tags": ["1girl", "solo"], "title": f"{name}.png", "score": 3}
        (tmp_path / "json" / f"{name}.png.json").write_text(json.dumps(about))
        write_image(tmp_path / "lines" / f"{name}.png")
    lines = [json.dumps({"file_name": f"{name}.png", "additional_feature": name}) for name in "ab"]
    (tmp_path / "lines" / "metadata.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"a\.png has tags, title: data\.captions\.fields=\[NAME\] reads one"):
        opened(tmp_path / "json")
    with pytest.raises(UserError, match=r"line 1: no text \(it has additional_feature\)"):
        opened(tmp_path / "lines")
    read = records(opened(tmp_path / "json", captions={"fields": ["title"]}))
    assert [record.texts["title"] for record in read] == ["a.png", "b.png"]
