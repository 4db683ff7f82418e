"""Training may change its tensors while a save is written; errors come back later; a bad disk is borne for a while."""

from __future__ import annotations

import errno
import os
import subprocess
import threading

import pytest
import torch
from layouts import bits, content, equal, held
from rank_threads import all_fine, together

from daguerre.checkpoint import async_save, atomic, shards
from daguerre.checkpoint.async_save import FailedSaves, HostMemory, Saver
from daguerre.checkpoint.manifest import CheckpointError
from daguerre.checkpoint.retention import RetentionPolicy
from daguerre.checkpoint.sharded import ShardedStore
from daguerre.checkpoint.shards import ShardedTensor
from daguerre.checkpoint.store import Store
from daguerre.ranks import ALONE, RanksGone


@pytest.fixture
def disk(monkeypatch):
    """A disk that can be told to wait or to refuse, at each sync of a file of tensors."""

    class Disk:
        def __init__(self):
            self.go, self.refusal = threading.Event(), 0
            self.go.set()

        def fsync(self, descriptor):
            if ".safetensors" in os.readlink(f"/proc/self/fd/{descriptor}"):
                assert self.go.wait(20)
                if self.refusal:
                    raise OSError(self.refusal, os.strerror(self.refusal))

    found = Disk()
    monkeypatch.setattr(atomic.os, "fsync", found.fsync)
    return found


def groups(number):
    return held(number, 0, 1, 1)


def change(held_groups):
    for named in held_groups.values():
        for each in named.values():
            for piece in each.pieces:
                piece.tensor.zero_()


def saver(root, **options):
    return Saver(ShardedStore(root, ALONE), **options)


@pytest.mark.parametrize("background", [True, False])
def test_what_changes_after_a_save_began_is_not_in_it(tmp_path, disk, background):
    saving = saver(tmp_path / "c", background=background)
    told = []
    for number in (1, 2, 3):
        mine = groups(number)
        told += saving.settle()
        if background:
            disk.go.clear()
        told += saving.save(f"step-{number:08d}", mine, {"state": {"step": number}})
        assert saving.finished() is False
        change(mine)
        disk.go.set()
    told += saving.finish()
    assert [outcome.name for outcome in told] == ["step-00000001", "step-00000002", "step-00000003"]
    assert all(outcome.path and outcome.local_bytes and outcome.notices == [] for outcome in told)
    store = Store(tmp_path / "c")
    assert store.names() == ["step-00000002", "step-00000003"], "purged meanwhile"
    for number, name in [(2, "step-00000002"), (3, "step-00000003")]:
        assert equal(store.load(store.root / name).tensors, number)


def test_training_goes_on_while_it_is_written_and_one_is_in_flight(tmp_path, disk):
    saving = saver(tmp_path / "c")
    disk.go.clear()
    assert saving.save("step-00000001", groups(1), {}) == []
    assert not saving.finished(), "it returned before the disk was done"
    second = threading.Thread(target=lambda: saving.save("step-00000002", groups(2), {}))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "the next save waits for the one in flight"
    assert Store(tmp_path / "c").names() == []
    disk.go.set()
    second.join(20)
    assert saving.finish()[0].name == "step-00000002"
    assert Store(tmp_path / "c").names() == ["step-00000001", "step-00000002"]


def test_names_are_those_after_the_save_in_flight(tmp_path, disk):
    saving = saver(tmp_path / "c")
    assert saving.names() == []
    disk.go.clear()
    saving.save("step-00000001", groups(1), {})
    release = threading.Timer(0.2, disk.go.set)
    release.start()
    assert saving.names() == ["step-00000001"]
    assert [outcome.name for outcome in saving.finish()] == ["step-00000001"], "its outcome is still to be told"


def test_a_disk_that_is_too_slow_is_told(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(async_save, "_LONG_WAIT_SECONDS", 0.0)
    saving = saver(tmp_path / "c")
    saving.save("step-00000001", groups(1), {})
    (first,) = saving.save("step-00000002", groups(2), {})
    assert first.notices == []
    (second,) = saving.finish()
    assert "step-00000001 took 0 s to write, longer than the time until the next save" in second.notices[0]
    assert "Save less often, or use a faster disk" in second.notices[0]
    assert second.stalled_seconds > 0


def test_copies_are_made_into_the_same_memory(tmp_path):
    memory = HostMemory()
    own = {"f": content(1)["model"]}
    first = memory.copies(own)
    size = memory.size_bytes
    for name, tensor in own["f"].items():
        assert bits(first["f"][name]) == bits(tensor)
        assert first["f"][name].data_ptr() % 64 == 0 or tensor.numel() == 0
    second = memory.copies({"f": {name: tensor + 1 for name, tensor in own["f"].items()}})
    assert memory.size_bytes == size
    assert first["f"]["norm"].data_ptr() == second["f"]["norm"].data_ptr()
    larger = memory.copies({"f": {"w": torch.ones(size), "v": torch.ones(3)}})
    assert larger["f"]["w"].sum() == size
    assert memory.size_bytes <= 9 * size, "what was there is used again"


def test_a_second_save_needs_no_further_memory_and_no_other_plan(tmp_path, monkeypatch):
    made, real = [], torch.empty
    saving = saver(tmp_path / "c")
    saving.save("step-00000001", groups(1), {})
    saving.settle()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *given, **options: made.append(given) or real(*given, **options))
        patch.setattr(shards, "plan", None)
        saving.save("step-00000002", groups(2), {})
        assert made == []
    saving.finish()
    assert equal(Store(tmp_path / "c").load(tmp_path / "c" / "step-00000002").tensors, 2)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_refusing_disk_is_borne_counted_and_at_last_raised(tmp_path, disk, number):
    saving = saver(tmp_path / "c", failures=FailedSaves(3))
    saving.save("step-00000001", groups(1), {})
    assert saving.settle()[0].path
    disk.refusal = number
    saving.save("step-00000002", groups(2), {})
    (failed,) = saving.save("step-00000003", groups(3), {})
    assert failed.path is None
    assert "SAVE FAILED (1 in a row, 1 in all): cannot save step-00000002" in failed.notices[0]
    assert os.strerror(number) in failed.notices[0]
    assert "after 2 more the run stops" in failed.notices[0]
    (failed,) = saving.settle()
    assert "2 in a row, 2 in all" in failed.notices[0]
    disk.refusal = 0
    saving.save("step-00000004", groups(4), {})
    (good,) = saving.settle()
    assert good.notices == ["saving works again after 2 failed saves"]
    disk.refusal = number
    for step in (5, 6, 7):
        saving.save(f"step-{step:08d}", groups(step), {})
    with pytest.raises(CheckpointError, match=r"cannot save step-00000007.*3 saves in a row failed"):
        saving.save("step-00000008", groups(8), {})
    assert saving.failures.total == 5
    assert saving.finish() == []
    store = Store(tmp_path / "c")
    assert store.names() == ["step-00000001", "step-00000004"], "nothing older is lost"
    assert equal(store.load(store.recover().path).tensors, 4)
    assert not list(store.root.glob(".*"))


def test_the_last_save_must_not_fail(tmp_path, disk):
    saving = saver(tmp_path / "c")
    disk.refusal = errno.ENOSPC
    saving.save("step-00000001", groups(1), {})
    with pytest.raises(CheckpointError, match="cannot save step-00000001"):
        saving.finish()


def test_a_purge_that_fails_is_told_and_tried_again(tmp_path, disk, monkeypatch):
    saving = saver(tmp_path / "c")
    for number in (1, 2):
        saving.save(f"step-{number:08d}", groups(number), {})
    saving.settle()

    def refuse(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr("daguerre.checkpoint.store.shutil.rmtree", refuse)
        saving.save("step-00000003", groups(3), {})
        (outcome,) = saving.settle()
    assert outcome.path
    assert "older checkpoints are not purged" in outcome.notices[0]
    saving.save("step-00000004", groups(4), {})
    assert saving.finish()[0].notices == []
    assert Store(tmp_path / "c").names() == ["step-00000003", "step-00000004"]


def test_content_that_cannot_be_saved_is_raised_at_once(tmp_path):
    saving = saver(tmp_path / "c")
    with pytest.raises(ValueError, match="document 'state' cannot be saved"):
        saving.save("step-00000001", groups(1), {"state": float("inf")})
    with pytest.raises(ValueError, match="complex64"):
        saving.save("step-00000001", {"m": {"w": ShardedTensor.of(torch.zeros(1, dtype=torch.complex64))}}, {})
    assert saving.finish() == []


def test_ranks_save_keep_and_fail_alike(tmp_path, disk):
    def one(rank):
        saving = Saver(ShardedStore(tmp_path / "c", rank), RetentionPolicy(2, lambda step: step // 4))
        told = []
        for number in range(1, 9):
            if rank.rank == 0:
                disk.refusal = errno.ENOSPC if number == 6 else 0
            mine = held(number, rank.rank, 2, 1)
            saving.save(f"step-{number:08d}", mine, {"state": {"step": number}})
            change(mine)
            told += saving.settle()
        return [(each.name, each.path, each.notices) for each in told + saving.finish()], saving.failures

    results = all_fine(together(2, one))
    assert results[0] == results[1]
    outcomes, failures = results[0]
    assert [path is None for _, path, _ in outcomes] == [number == 6 for number in range(1, 9)]
    assert (failures.total, failures.in_a_row) == (1, 0)
    store = Store(tmp_path / "c")
    assert [int(name[-8:]) for name in store.names()] == [4, 7, 8]
    for name in store.names():
        assert equal(store.load(store.root / name).tensors, int(name[-8:]))


def test_a_rank_that_is_gone_is_no_failed_save(tmp_path):
    def one(rank):
        saving = Saver(ShardedStore(tmp_path / "c", rank))
        if rank.rank == 1:
            saving.store.plan("step-00000001", held(1, 1, 2, 1), {})
            return None
        saving.save("step-00000001", held(1, 0, 2, 1), {})
        with pytest.raises(RanksGone):
            saving.finish()
        return saving.failures.total

    assert all_fine(together(2, one, patience=0.5)) == [0, None]
    assert list((tmp_path / "c").iterdir()) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(where)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here ({mounted.stderr.strip()})")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_a_disk_that_is_really_full_and_then_not(small_disk):
    filler = small_disk / "filler"

    def one(rank):
        saving = Saver(ShardedStore(small_disk / "c", rank), failures=FailedSaves(3))
        told = []
        for number in range(1, 5):
            if rank.rank == 0 and number == 2:
                free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize
                filler.write_bytes(b"x" * (free - 8192))
            if rank.rank == 0 and number == 4:
                filler.unlink()
            saving.store.ranks.share()  # all see the disk in this state
            saving.save(f"step-{number:08d}", held(number, rank.rank, 2, 1), {})
            told += saving.settle()
        return told + saving.finish()

    for told in all_fine(together(2, one)):
        assert [outcome.path is not None for outcome in told] == [True, False, False, True]
        assert "No space left on device" in told[1].notices[0]
        assert "MB are free" in told[1].notices[0]
        assert told[3].notices == ["saving works again after 2 failed saves"]
    store = Store(small_disk / "c")
    assert store.names() == ["step-00000001", "step-00000004"]
    assert equal(store.load(store.root / "step-00000001").tensors, 1)
    assert not list(store.root.glob(".*"))


def test_a_policy_of_one_stops_at_the_first():
    error = CheckpointError("cannot save")
    with pytest.raises(CheckpointError, match=r"^cannot save$"):
        FailedSaves(1).failed(error)
