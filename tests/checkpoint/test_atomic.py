"""A file replaced atomically has the old bytes or the new ones, and JSON that would not come back is refused."""

import json
import os

import pytest

from daguerre.checkpoint import atomic


def test_create_and_replace(tmp_path):
    path = tmp_path / "a.txt"
    for data in (b"old", b"", b"new"):
        atomic.write_bytes_atomically(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("refused", ["fsync", "replace"])
def test_a_refusal_keeps_the_old_bytes(tmp_path, monkeypatch, refused):
    path = tmp_path / "a.txt"
    atomic.write_bytes_atomically(path, b"old")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, refused, refuse)
    with pytest.raises(OSError, match="No space left"):
        atomic.write_bytes_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_no_obstacle(tmp_path):
    (tmp_path / ".a.txt.tmp").write_bytes(b"half")
    atomic.write_bytes_atomically(tmp_path / "a.txt", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_the_file_is_synced_before_its_name_and_the_folder_after(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (events.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("replace"), replace(a, b)))
    atomic.write_json_atomically(tmp_path / "a.json", {"x": 1})
    assert events == [".a.json.tmp", "replace", tmp_path.name]


def test_json_comes_back_equal_and_readable(tmp_path):
    document = {"text": "größer 画", "half": "\udcff", "numbers": [1, 0.1, None, True]}
    data = atomic.to_json(document)
    assert json.loads(data) == document
    assert "größer 画" in data.decode()


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), (1, 2), {1: 2}])
def test_json_that_would_not_come_back_is_refused(bad):
    with pytest.raises(ValueError, match=r"JSON"):
        atomic.to_json({"x": bad})


def test_written_says_size_and_digest(tmp_path):
    written = atomic.write_durably(tmp_path / "a", [b"ab", memoryview(b"c")])
    assert written.size_bytes == 3
    assert written.sha256.startswith("ba7816bf")
    with pytest.raises(FileExistsError):
        atomic.write_durably(tmp_path / "a", [b"x"])
