"""Ranges of local files by descriptors that stay open."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from daguerre.regular import Irregular
from daguerre.storage import local_files


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / str(i) for i in range(50)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 1000)
    return paths


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_ranges_and_ends(files):
    assert local_files.read(files[3], 10, 5) == b"\3" * 5
    assert local_files.read(files[3], 990, 100) == b"\3" * 10
    assert local_files.read(files[3], 5000, 10) == b""


def test_descriptors_are_few(files):
    before = open_descriptors()
    for path in files * 3:
        local_files.read(path, 0, 1)
    assert open_descriptors() - before <= local_files.OPEN_FILES


def test_a_replaced_file_is_read_anew(files):
    local_files.read(files[0], 0, 1)
    files[1].rename(files[0])
    assert local_files.read(files[0], 0, 1) == b"\1"


def test_a_deleted_file_is_missing_and_its_descriptor_closed(files):
    local_files.read(files[0], 0, 1)
    local_files.read(files[2], 0, 1)
    opened = open_descriptors()
    files[0].unlink()
    files[2].unlink()
    with pytest.raises(FileNotFoundError):
        local_files.read(files[0], 0, 1)
    assert open_descriptors() == opened - 2


def test_threads_may_share_them(files):
    def right(number: int) -> bool:
        return local_files.read(files[number % 50], number % 900, 100) == bytes([number % 50]) * 100

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(right, range(5000)))


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, error in ((tmp_path / "pipe", Irregular), (Path("/dev/null"), Irregular), (tmp_path, IsADirectoryError)):
        for read in (local_files.opened, lambda path: local_files.read(path, 0, 4)):
            with pytest.raises(error):
                read(path)
