"""A full disk: no part of a file is left at its name or beside it, the message says which disk, and the same command
goes on afterwards."""

import errno
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import data_sets
import pytest
from PIL import Image

from daguerre import errors, fresh
from daguerre.checkpoint import atomic
from daguerre.checkpoint.export import replaced
from daguerre.cli import main
from daguerre.data.tar import writer


@contextmanager
def full_disk(folder):
    """A file system in memory on which one page is left; skips the test where none may be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("NOT TESTED: a real full disk, as no file system may be mounted here (needs root)")
    try:
        (folder / "ballast").write_bytes(bytes(shutil.disk_usage(folder).free - 4096))
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize(
    ("command", "left"),
    [
        ("data show {data} -o {disk}/show.png", []),
        ("data show {data} -o {disk}/show.jpg", []),
        ("data pack {data} -o {disk}/packed", ["packed/dataset.json"]),  # begun, and says so
        ("data stats {data} -o {disk}/stats.html", []),
        ("data index {disk}/*.tar", []),
    ],
)
def test_data_verbs(tmp_path, capsys, command, left):
    if "index" in command:
        data_sets.shards(tmp_path / "data", 1, 4)
    else:
        data_sets.folder(tmp_path / "data", 4)
    with full_disk(tmp_path / "disk") as disk:
        if "index" in command:
            (disk / "ballast").unlink()
            shutil.copy(next((tmp_path / "data").glob("*.tar")), disk)
            (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free))
        before = {path for path in disk.rglob("*") if path.is_file()}
        words = command.format(data=tmp_path / "data", disk=disk).split()
        assert main.run(words) == errors.FAILED
        said = capsys.readouterr().err
        assert f"No space left on device: {disk}/" in said
        assert "Free some space and run the same command again" in said
        there = sorted(str(path.relative_to(disk)) for path in disk.rglob("*") if path.is_file() and path not in before)
        assert there == left
        (disk / "ballast").unlink()
        assert main.run(words) == errors.DONE, capsys.readouterr().err
        for image in disk.glob("show.*"):
            Image.open(image).load()


def test_a_copy_names_the_file_that_could_not_be_written(capsys):
    """The first name of such an error is that of the file that was read."""
    error = OSError(errno.ENOSPC, "No space left on device", "/base/README.md", None, "/full/README.md")
    assert main._report_os_error(error) == errors.FAILED
    assert "No space left on device: /full/README.md. Free some space" in capsys.readouterr().err


def _refused(file, number):
    file.write(b"a part")
    raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", fresh.FULL)
def test_what_is_written_is_named_and_nothing_is_left(tmp_path, number):
    name = "x" * 255  # no room for the usual end of a hidden name
    with pytest.raises(OSError, match=os.strerror(number)) as refused, replaced(tmp_path / name):
        raise OSError(number, os.strerror(number))
    assert refused.value.filename == str(tmp_path / name)
    with pytest.raises(OSError, match=os.strerror(number)) as refused, writer.replacing(tmp_path / name) as file:
        _refused(file, number)
    assert refused.value.filename == str(tmp_path / name)
    with pytest.raises(OSError, match=os.strerror(number)) as refused, atomic.replacing(tmp_path / name) as fresh_file:
        raise OSError(number, os.strerror(number), str(fresh_file))  # as `write_durably` names it
    assert refused.value.filename == str(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_export_left_is_cleared_for_its_own_name_alone(tmp_path):
    """Also where the name has signs of patterns."""
    for name in (".*.new-1", ".a.new-1", ".[b].new-1", ".b.new-1"):
        (tmp_path / name).mkdir()
    for name in ("*", "[b]"):
        with replaced(tmp_path / name) as folder:
            (folder / "x").write_text("x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["*", ".a.new-1", ".b.new-1", "[b]"]


def test_longest_names(tmp_path):
    path = Path(tmp_path / ("é" * 127))
    assert len(os.fsencode(fresh.hidden(path, ".tmp").name)) <= 255
    assert fresh.hidden(tmp_path / "a", ".tmp").name == ".a.tmp"
