"""`daguerre train` on a user's own images, on files that are no images, and on places that cannot be written to."""

import contextlib
import json
import os
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image
from tiny_runs import TINY, assert_equal, lines, outcome, train

from daguerre import errors
from daguerre.checkpoint import contents
from daguerre.cli import main
from daguerre.training import step

FORMATS = ("jpg", "png", "webp")
OF_ANY_SOURCE = [override for override in TINY if not override.startswith("data.")]


def train_on(images, output_dir, *overrides):
    """Trains on a folder in this process; the exit code."""
    data = ["data.source=folder", f"data.path={images}"]
    return main.run(["train", "quickstart", f"output_dir={output_dir}", *OF_ANY_SOURCE, *data, *overrides])


def image(path, number=0):
    """Writes an image of noise; the file's ending says in which format."""
    pixels = np.random.default_rng(number).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def captioned(path, number=0, text="an image of noise"):
    image(path, number).with_suffix(".txt").write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Six good images of three formats, and one of each thing that cannot be used."""
    folder = tmp_path_factory.mktemp("mixed")
    for number in range(6):
        captioned(folder / f"good{number}.{FORMATS[number % 3]}", number, f"image {number}")
    whole = captioned(folder / "cut.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    captioned(folder / "zero.jpg").write_bytes(b"")
    captioned(folder / "words.png").write_bytes(b"this is no image")
    captioned(folder / "latin.png").with_suffix(".txt").write_bytes("café".encode("latin-1"))
    image(folder / "bare.webp")
    return folder


LEFT_OUT = {
    "truncated image": ["cut.jpg"],
    "empty file": ["zero.jpg"],
    "not an image (JPEG, PNG and WebP can be read)": ["words.png"],
    "caption file that is not UTF-8": ["latin.txt"],
    "image without a caption": ["bare.webp"],
}


@pytest.fixture(scope="module")
def on_images(mixed, tmp_path_factory):
    """The folder of an uninterrupted run on `mixed`."""
    output_dir = tmp_path_factory.mktemp("on_images")
    assert train_on(mixed, output_dir) == errors.DONE
    return output_dir / "tiny"


@pytest.mark.long
def test_a_folder_is_trained_on_and_the_shapes_drop_out_aloud(mixed, tmp_path, capsys):
    assert train_on(mixed, tmp_path, "training.duration=2 steps") == errors.DONE
    said = capsys.readouterr().out
    assert "data.source is folder instead of shapes: the recipe's data.checked_prompts dropped out" in said
    assert "generated images of this data set cannot be scored" in said
    assert "validation.compared_images" not in said, "whole weights cannot be switched off"
    assert "on folder at 64 px" in said
    for reason in LEFT_OUT.keys() - {"truncated image"}:
        assert reason in said, "what was left out is said at the start"
    assert not (tmp_path / "tiny" / "evaluation.json").exists()
    assert not any(key.startswith("evaluation/") for line in lines(tmp_path / "tiny") for key in line)


def test_what_cannot_be_used_is_counted_and_the_run_goes_on(on_images):
    data = json.loads((on_images / "data.json").read_text())
    assert data["source"] == "folder"
    assert {reason: entry["examples"] for reason, entry in data["skipped"].items()} == LEFT_OUT
    assert all(entry["count"] == 1 for entry in data["skipped"].values())
    page = (on_images / "report.html").read_text(encoding="utf-8")
    for reason, examples in LEFT_OUT.items():
        assert reason in page
        assert examples[0] in page
    assert json.loads((on_images / "status.json").read_text())["state"] == "finished"


@pytest.mark.long
def test_on_a_folder_too_a_killed_run_ends_equal_to_the_bit(mixed, on_images, tmp_path, monkeypatch):
    unharmed, calls = step.update, []

    class Killed(BaseException):
        pass

    def deadly(*args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            raise Killed
        return unharmed(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(step, "update", deadly)
        with pytest.raises(Killed):
            train_on(mixed, tmp_path)
    assert train_on(mixed, tmp_path) == errors.DONE
    assert_equal(tmp_path / "tiny", outcome(on_images))


@pytest.mark.long  # of the quick tests, a folder is trained on
def test_captions_in_one_file(tmp_path, capsys):
    folder = tmp_path / "images"
    folder.mkdir()
    names = [image(folder / f"{number}.{FORMATS[number]}", number).name for number in range(3)]
    listed = [json.dumps({"file_name": name, "text": f"caption of {name}"}) for name in [*names, "gone.jpg"]]
    (folder / "metadata.jsonl").write_text("\n".join([*listed, "{broken"]), encoding="utf-8")
    assert train_on(folder, tmp_path, "training.duration=1 step", "lr_scheduler.warmup=0 steps") == errors.DONE
    skipped = json.loads((tmp_path / "tiny" / "data.json").read_text())["skipped"]
    assert skipped["image named in metadata.jsonl that is not in the folder"]["count"] == 1
    assert skipped["line of metadata.jsonl that cannot be used"]["examples"] == ["metadata.jsonl line 5: no JSON"]
    drawn = json.loads((tmp_path / "tiny" / "samples" / "step-00000001" / "samples.json").read_text())
    assert {entry["prompt"] for entry in drawn} <= {f"caption of {name}" for name in names}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nothing", "there is no JPEG, PNG or WebP file"),
        ("no caption", "none of the 1 images"),
        ("no folder", "does not exist"),
        ("no UTF-8", "caption file that is not UTF-8: cat.txt"),
        ("no pixels", "could be decoded"),
    ],
)
def test_nothing_to_train_on_is_an_error_that_says_what_is_expected(tmp_path, capsys, content, message):
    folder = tmp_path / "images"
    if content != "no folder":
        folder.mkdir()
    if content in ("no caption", "no UTF-8"):
        image(folder / "cat.png")
    if content == "no UTF-8":
        (folder / "cat.txt").write_bytes(b"\xff\xfe\xfa")
    if content == "no pixels":
        whole = captioned(folder / "cat.png").read_bytes()
        (folder / "cat.png").write_bytes(whole[: len(whole) // 2])
    assert train_on(folder, tmp_path / "runs", "data.repeats=2") == errors.REFUSED
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_an_output_folder_that_takes_no_files_is_refused_by_name(capsys):
    assert train("/proc") == errors.REFUSED
    said = capsys.readouterr().err
    assert "cannot write to /proc/tiny" in said
    assert "Choose an output_dir that you may write to" in said


@pytest.fixture(scope="module")
def on_shapes(tmp_path_factory):
    """The folder of an uninterrupted run."""
    output_dir = tmp_path_factory.mktemp("on_shapes")
    assert train(output_dir) == errors.DONE
    return output_dir / "tiny"


@pytest.mark.long
def test_a_disk_that_refuses_a_save_costs_nothing_but_time(on_shapes, tmp_path, monkeypatch, capsys):
    """The error of the system is made here; the next test fills a real disk."""
    unharmed = contents.write_files

    def refusing(temporary, parts):
        if "step-00000006" in temporary.name:
            raise OSError(28, "No space left on device", str(temporary / "model.safetensors"))
        return unharmed(temporary, parts)

    with monkeypatch.context() as patched:
        patched.setattr(contents, "write_files", refusing)
        assert train(tmp_path, "checkpoint.max_failed_saves=1") == errors.REFUSED
    said = capsys.readouterr().err
    for part in ("cannot save step-00000006", "No space left on device", "Free some space", "same command again"):
        assert part in said
    assert "Traceback" not in said
    assert train(tmp_path) == errors.DONE
    assert_equal(tmp_path / "tiny", outcome(on_shapes))


@contextlib.contextmanager
def small_disk(folder, capacity_bytes):
    """A file system of this size in memory; skips the test where none may be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={capacity_bytes}", "none", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("NOT TESTED: a real full disk, as no file system may be mounted here (needs root)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def size_bytes(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.long  # of the quick tests, run/test_refused_saves.py has the error of the system, and goes on after it
@pytest.mark.parametrize("moment", ["first save", "export", "second save", "first save, beside training"])
def test_a_full_disk_is_explained_and_the_same_command_goes_on(on_shapes, tmp_path, capsys, moment):
    checkpoint = size_bytes(on_shapes / "checkpoints" / "step-00000008")
    pipeline = size_bytes(on_shapes / "pipeline")
    room = {
        "first save": checkpoint // 2,
        "export": checkpoint + pipeline // 2,
        "second save": checkpoint + pipeline + checkpoint // 2,
        "first save, beside training": checkpoint // 2,
    }[moment]
    background = f"checkpoint.background={str('beside' in moment).lower()}"
    with small_disk(tmp_path / "disk", 3 * checkpoint + 3 * pipeline) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(shutil.disk_usage(disk).free - room))
        assert train(disk, "checkpoint.max_failed_saves=1", background) in (errors.FAILED, errors.REFUSED)
        said = capsys.readouterr().err
        assert "No space left on device" in said
        assert "Free some space" in said
        assert "Traceback" not in said
        saved = sorted(path.name for path in (disk / "tiny" / "checkpoints").iterdir())
        assert saved == ([] if "first" in moment else ["step-00000003"]), "nothing half, nothing lost"
        ballast.unlink()
        assert train(disk) == errors.DONE
        assert_equal(disk / "tiny", outcome(on_shapes))


@pytest.mark.long
def test_a_batch_larger_than_the_data_leaves_nothing_behind_and_dry_run_finds_it(tmp_path, capsys):
    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("a.png", "b.png", "c.png"):
        captioned(folder / name)
    too_many = "training.global_batch_size=64"
    assert train_on(folder, tmp_path, too_many, "training.per_device_batch_size=null", "--dry-run") == errors.REFUSED
    assert train_on(folder, tmp_path, too_many, "training.per_device_batch_size=null") == errors.REFUSED
    assert "a batch of 64 samples is larger than an epoch of the data set" in capsys.readouterr().err
    assert not (tmp_path / "tiny" / "config.yaml").exists()
    assert train_on(folder, tmp_path, "training.duration=1 step", "lr_scheduler.warmup=0 steps") == errors.DONE
