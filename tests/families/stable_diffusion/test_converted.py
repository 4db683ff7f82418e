"""Folders that are made once from other files: by content, whole, and by one process at a time."""

import os
import threading
import time

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import write_sd

from daguerre.families.stable_diffusion.single_file import load, save
from daguerre.models.weights import conversion_cache


def test_the_content_decides_not_the_name(tmp_path):
    made = []

    def make(fresh):
        made.append(1)
        (fresh / "copy").write_bytes((tmp_path / "a").read_bytes())

    (tmp_path / "a").write_bytes(b"one")
    first = conversion_cache.once([tmp_path / "a"], make)
    assert conversion_cache.once([tmp_path / "a"], make) == first
    assert len(made) == 1
    stat = (tmp_path / "a").stat()
    (tmp_path / "a").write_bytes(b"two")
    os.utime(tmp_path / "a", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the size and the time are as they were
    second = conversion_cache.once([tmp_path / "a"], make)
    assert (second / "copy").read_bytes() == b"two"
    (tmp_path / "a").write_bytes(b"one")
    assert conversion_cache.once([tmp_path / "a"], make) == first
    assert conversion_cache.once([tmp_path / "a"], make, "another way") != first
    assert len(made) == 3


def test_processes_that_want_the_same_wait_for_each_other(tmp_path):
    made = []

    def make(fresh):
        made.append(1)
        time.sleep(0.2)
        (fresh / "file").touch()

    (tmp_path / "b").write_bytes(b"three")
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(conversion_cache.once([tmp_path / "b"], make))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(set(found)) == 1
    assert (found[0] / "file").is_file()


def test_what_fails_leaves_no_folder(tmp_path):
    (tmp_path / "c").write_bytes(b"four")

    def fail(fresh):
        (fresh / "half").touch()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        conversion_cache.once([tmp_path / "c"], fail)
    made = conversion_cache.once([tmp_path / "c"], lambda fresh: (fresh / "whole").touch())
    assert {path.name for path in made.iterdir()} == {"whole", ".digests.json"}


def test_a_dry_run_that_builds_without_memory_converts_real_weights(tmp_path):
    folder = write_sd(tmp_path / "p", seed=11)
    file = tmp_path / "model.safetensors"
    save.write(file, folder)
    with torch.device("meta"):
        made = load.folder(file, pickled=False)
    expected = load_file(folder / "unet" / "diffusion_pytorch_model.safetensors")
    found = load_file(made / "unet" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
