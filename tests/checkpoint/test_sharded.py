"""What several ranks save together any number of ranks load, bit for bit; damage and refusals reach all of them."""

from __future__ import annotations

import errno
import json
import os
import random

import pytest
import torch
from layouts import bits, content, equal, full, held
from rank_threads import all_fine, together
from tiny_checkpoints import save as save_alone
from whole_store import WholeStore

from daguerre.checkpoint import atomic, manifest, safetensors, sharded, shards
from daguerre.checkpoint.manifest import CheckpointError, Damaged
from daguerre.checkpoint.retention import RetentionPolicy
from daguerre.checkpoint.shard_reader import opened
from daguerre.checkpoint.sharded import ShardedStore
from daguerre.checkpoint.shards import Region, Shard, ShardedTensor
from daguerre.checkpoint.store import Store
from daguerre.ranks import ALONE, RanksGone

MESHES = {1: [(1, 1)], 2: [(1, 1), (2, 1), (1, 2)], 3: [(3, 1)], 4: [(1, 1), (4, 1), (2, 2), (2, 1)]}
"""Degrees of fsdp and tensor, by ranks; what they leave are copies."""


def save(root, ranks, number, mesh=(1, 1), steps=1):
    """Save the content of a number as the ranks of a mesh hold it."""

    def one(rank):
        store = ShardedStore(root, rank)
        for step in range(number, number + steps):
            planned = store.plan(
                f"step-{step:08d}", held(step, rank.rank, *mesh), {"state": {"step": step}}, {"t/v.json": b"{}"}
            )
            path = store.commit(planned)
        return path

    return all_fine(together(ranks, one))[0]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize(("ranks", "mesh"), [(n, mesh) for n, meshes in MESHES.items() for mesh in meshes])
def test_every_mesh_loads_what_a_mesh_saved(tmp_path, ranks, mesh):
    path = save(tmp_path / "c", ranks, 7, mesh)
    loaded = Store(path.parent).load(path)
    assert equal(loaded.tensors, 7), "whole, in one process"
    assert loaded.documents == {"state": {"step": 7}}
    assert loaded.files == {"t/v.json": b"{}"}
    for others, meshes in MESHES.items():
        for other in meshes:
            for rank in range(others):
                wanted, right = held(8, rank, *other), held(7, rank, *other)
                with opened(path) as reader:
                    reader.fill(wanted)
                for group, tensors_ in wanted.items():
                    for name, each in tensors_.items():
                        for got, true in zip(each.pieces, right[group][name].pieces, strict=True):
                            assert bits(got.tensor) == bits(true.tensor), (others, other, rank, name)


def test_each_element_is_on_disk_once(tmp_path):
    path = save(tmp_path / "c", 4, 1, (2, 2))
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    values = sum(t.numel() * t.element_size() for group in content(1).values() for t in group.values())
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in path.glob("*.safetensors"))
    assert sum(sizes) == values + headers
    assert len(sizes) <= 8


def test_any_slice_of_either_layout(tmp_path):
    split = save(tmp_path / "c", 4, 3, (2, 2))
    alone = WholeStore(tmp_path / "alone").save(
        "step-00000003", content(3), {"state": {"step": 3}}, {"t/v.json": b"{}"}
    )
    chance = random.Random(0)
    for path in (split, alone):
        with opened(path) as reader:
            assert {g: set(t) for g, t in reader.index.items()} == {g: set(t) for g, t in content(3).items()}
            assert reader.document("state") == {"step": 3}
            assert reader.file("t/v.json") == b"{}"
            for group, named in content(3).items():
                for name, whole in named.items():
                    assert bits(reader.read(group, name)) == bits(whole)
                    for _ in range(10):
                        offsets = tuple(chance.randint(0, n) for n in whole.shape)
                        shape = tuple(chance.randint(0, n - o) for o, n in zip(offsets, whole.shape, strict=True))
                        region = Region(offsets, shape)
                        cut = whole[tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))]
                        assert bits(reader.read(group, name, region)) == bits(cut)


@pytest.mark.parametrize("dtype", safetensors._DTYPES, ids=str)
def test_every_dtype(tmp_path, dtype):
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6, 8), dtype=torch.uint8)
    values = raw.view(dtype) if dtype is not torch.bool else raw.bool()
    half = values.shape[1] // 2 or 1

    def one(rank):
        columns = values[:, half * rank.rank : half * (rank.rank + 1)] if values.shape[1] > 1 else values
        offsets = (0, half * rank.rank) if values.shape[1] > 1 else (0, 0)
        sliced = ShardedTensor(tuple(values.shape), dtype, [Shard(offsets, columns)])
        scalar = ShardedTensor.of(values[0, 0].clone())
        store = ShardedStore(tmp_path / "c", rank)
        return store.commit(store.plan("step-00000001", {"m": {"w": sliced, "s": scalar}}, {}))

    path = all_fine(together(2, one))[0]
    loaded = Store(path.parent).load(path).tensors["m"]
    assert bits(loaded["w"]) == bits(values)
    assert bits(loaded["s"]) == bits(values[0, 0])
    with opened(path) as reader:
        assert bits(reader.read("m", "w", Region((1, 0), (4, values.shape[1])))) == bits(values[1:5])


def test_only_the_files_that_hold_a_slice_are_opened(tmp_path):
    path = save(tmp_path / "c", 4, 1, (4, 1))
    for file in path.glob("*-0000[123]-of-00004.safetensors"):
        file.unlink()
    with opened(path) as reader:
        assert bits(reader.read("model", "uneven", Region((0, 1), (2, 3)))) == bits(full(1, "uneven")[0:2, 1:4])
    store = Store(path.parent)
    with pytest.raises(Damaged, match=r"-of-00004.safetensors is missing"):
        store.load(path)


def test_groups_asked_for_alone(tmp_path):
    path = save(tmp_path / "c", 4, 1, (2, 2))
    for file in path.glob("model-*"):
        file.write_bytes(b"")
    store = Store(path.parent)
    assert set(store.load(path, only=("ema",)).tensors) == {"ema"}
    assert sorted(store.groups(path)) == ["ema", "model"]
    assert sorted(store.groups(save_alone(WholeStore(path.parent), 2))) == ["model", "optimizer"]
    with pytest.raises(CheckpointError, match="has no tensors named x; it has"):
        Store(path.parent).load(path, only=("x",))


def test_what_does_not_fit_is_told_before_anything_is_read(tmp_path):
    path = save(tmp_path / "c", 2, 1, (2, 1))
    wanted = {
        "model": {
            "uneven": ShardedTensor.of(torch.zeros(7, 5)),
            "norm": ShardedTensor.of(torch.zeros(6)),
            "few": ShardedTensor.of(torch.zeros(2, 4)),
            "new": ShardedTensor.of(torch.zeros(1)),
        }
    }
    with opened(path) as reader:
        with pytest.raises(
            CheckpointError, match=r"norm of model is .*float16, expected .*; few of .*; model has no new"
        ):
            reader.fill(wanted)
        assert not wanted["model"]["uneven"].pieces[0].tensor.any()
        for wrong, message in [
            (("x", "y"), "has no tensors named x"),
            (("model", "y"), "no tensor 'y' in model"),
            (("model", "norm", Region((5,), (2,))), "there is no slice"),
            (("model", "norm", Region((0, 0), (2, 2))), "there is no slice"),
        ]:
            with pytest.raises(CheckpointError, match=message):
                reader.read(*wrong)
        with pytest.raises(CheckpointError, match=r"has no other.json; it has"):
            reader.document("other")


def test_the_plan_is_made_again_only_when_slices_change(tmp_path, monkeypatch):
    made, real = [], shards.plan
    monkeypatch.setattr(shards, "plan", lambda holdings: made.append(len(holdings)) or real(holdings))

    def one(rank):
        store = ShardedStore(tmp_path / "c", rank)
        for number, mesh in enumerate([(2, 1), (2, 1), (1, 2), (1, 2)]):
            path = store.commit(store.plan(f"step-{number:08d}", held(number, rank.rank, *mesh), {}))
            if rank.rank == 0:
                assert equal(Store(path.parent).load(path).tensors, number)

    all_fine(together(2, one))
    assert made == [2, 2]


def test_what_ranks_do_not_agree_on_is_refused_on_all(tmp_path):
    def names(rank):
        ShardedStore(tmp_path / "c", rank).plan(f"step-0000000{rank.rank}", {}, {})

    def document(rank):
        ShardedStore(tmp_path / "c", rank).plan("step-00000001", {}, {"state": {"loss": float("nan")}})

    def dtype(rank):
        wrong = ShardedTensor.of(torch.zeros(1, dtype=torch.complex64 if rank.rank == 1 else torch.float32))
        ShardedStore(tmp_path / "c", rank).plan("step-00000001", {"m": {"w": wrong}}, {})

    def group(rank):
        ShardedStore(tmp_path / "c", rank).plan("step-00000001", {"../m": {"w": ShardedTensor.of(torch.zeros(1))}}, {})

    def gap(rank):
        piece = Shard((rank.rank,), torch.zeros(1))
        ShardedStore(tmp_path / "c", rank).plan(
            "step-00000001", {"m": {"w": ShardedTensor((3,), torch.float32, [piece])}}, {}
        )

    for action, message in [
        (names, "rank 1 saves step-00000001, rank 0 saves step-00000000"),
        (document, "rank 0: document 'state' cannot be saved"),
        (dtype, "rank 1: tensor 'w' is torch.complex64"),
        (group, "cannot be files of a checkpoint"),
        (gap, "1 of its 3 elements are held by no rank"),
    ]:
        for error in together(2, action):
            assert type(error) is ValueError
            assert message in str(error)
    assert not (tmp_path / "c").exists()


def test_the_order_of_the_commit(tmp_path, monkeypatch):
    """Files of all ranks, then the manifest and its folder are safe on disk before the rename, the parent after it."""
    events = []

    def fsync(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))

    rename = os.rename
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    path = save(tmp_path / "c", 3, 1, (3, 1))
    temporary = next(event for event in events if event.startswith(".tmp-"))
    order = [".tmp" if event == temporary else event for event in events if event != tmp_path.name]
    ranks = [event for event in order if "-of-" in event]
    assert {file.name for file in path.glob("*-of-*")} == set(ranks)
    last = max(order.index(file) for file in ranks)
    assert order.index("slices.json") > last
    assert order[-4:] == ["manifest.json", ".tmp", "rename", "c"]
    assert order[: last + 4].count(".tmp") >= 3, "each rank syncs the folder"


def test_a_rank_that_cannot_write_is_told_on_all_and_nothing_older_is_lost(tmp_path, monkeypatch):
    save(tmp_path / "c", 3, 1, (3, 1))
    real = atomic.os.fsync

    def refusing(descriptor):
        where = os.readlink(f"/proc/self/fd/{descriptor}")
        if "model-00002" in where:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refusing)
        results = together(3, lambda rank: save_one(tmp_path / "c", rank, 2))
    for error in results:
        assert type(error) is CheckpointError
        assert "cannot save step-00000002: " in str(error)
        assert "(rank 2): No space left on device" in str(error)
        assert "the newest is step-00000001" in str(error)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step-00000001"]
    assert all_fine(together(3, lambda rank: save_one(tmp_path / "c", rank, 2)))


def save_one(root, rank, number):
    store = ShardedStore(root, rank)
    return store.commit(store.plan(f"step-{number:08d}", held(number, rank.rank, rank.count, 1), {}))


@pytest.mark.parametrize("call", ["mkdir", "rename"])
def test_rank_0_that_cannot_is_told_on_all(tmp_path, monkeypatch, call):
    save(tmp_path / "c", 2, 1, (2, 1))

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, call, refuse)
    for error in together(2, lambda rank: save_one(tmp_path / "c", rank, 2)):
        assert "cannot save step-00000002" in str(error)
        assert "Read-only file system" in str(error)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step-00000001"]


def test_a_rank_that_is_gone_commits_nothing(tmp_path):
    save(tmp_path / "c", 3, 1, (3, 1))

    def one(rank):
        store = ShardedStore(tmp_path / "c", rank)
        planned = store.plan("step-00000002", held(2, rank.rank, 3, 1), {})
        if rank.rank == 1:
            return None
        return store.commit(planned)

    results = together(3, one, patience=0.5)
    assert [type(result) for result in results] == [RanksGone, type(None), RanksGone]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step-00000001"]


def test_a_folder_that_is_not_shared_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(sharded, "_APPEARS_SECONDS", 0.2)

    def one(rank):
        root = tmp_path / f"node{rank.rank}"
        store = ShardedStore(root, rank)
        planned = store.plan("step-00000001", held(1, rank.rank, 2, 1), {})
        if rank.rank:
            monkeypatch.setattr(store, "_begin", None)
            real = store._write
            store._write = lambda planned, attempt, own: (
                (root / attempt).mkdir(parents=True), real(planned, attempt, own),
            )[1]  # fmt: skip
        return store.commit(planned)

    for error in together(2, one):
        assert "output_dir must be a folder that all nodes share" in str(error)


def test_verifying_is_shared_and_all_agree(tmp_path, monkeypatch):
    path = save(tmp_path / "c", 4, 1, (2, 2), steps=2)
    read = []
    real = manifest.verify
    monkeypatch.setattr(manifest, "verify", lambda folder, only=None: (read.append(only), real(folder, only))[1])
    found = all_fine(together(3, lambda rank: ShardedStore(tmp_path / "c", rank).recover()))
    assert [each.path.name for each in found] == ["step-00000002"] * 3
    assert len(read) == 3
    assert set.union(*read) == set(manifest.read(path.parent / "step-00000002"))
    assert sum(map(len, read)) == len(set.union(*read)), "each file is read by one rank"


def test_damage_is_set_aside_and_all_go_on_from_the_one_before(tmp_path):
    path = save(tmp_path / "c", 4, 1, (2, 2), steps=3)
    flip(path / "ema-00001-of-00004.safetensors", 3)
    found = all_fine(together(2, lambda rank: ShardedStore(tmp_path / "c", rank).newest_verified()))
    assert {each.path.name for each in found} == {"step-00000002"}
    assert path.exists()
    found = all_fine(together(2, lambda rank: ShardedStore(tmp_path / "c", rank).recover()))
    assert {each.path.name for each in found} == {"step-00000002"}
    assert all("ema-00001-of-00004.safetensors is damaged" in each.notices[0] for each in found)
    assert not path.exists()
    for error in together(2, lambda rank: ShardedStore(tmp_path / "c", rank).rewind("step-00000009")):
        assert "there is no checkpoint 'step-00000009'" in str(error)
    found = all_fine(together(2, lambda rank: ShardedStore(tmp_path / "c", rank).rewind("step-00000001")))
    assert {each.path.name for each in found} == {"step-00000001"}
    assert ShardedStore(tmp_path / "c", ALONE).names() == ["step-00000001"]


def test_a_disk_that_does_not_read_is_no_damage(tmp_path, monkeypatch):
    path = save(tmp_path / "c", 2, 1, (2, 1))
    real = manifest.verify

    def verify(folder, only=None):
        if any("00001-of" in name for name in only):
            raise OSError(errno.EIO, "Input/output error", str(folder / "x"))
        real(folder, only)

    monkeypatch.setattr(manifest, "verify", verify)
    for error in together(2, lambda rank: ShardedStore(tmp_path / "c", rank).recover()):
        assert isinstance(error, CheckpointError)
        assert "Input/output error. This may be temporary" in str(error)
    assert path.exists()


def test_a_newer_format_is_refused_and_not_set_aside(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 99)
        path = save(tmp_path / "c", 2, 1, (2, 1))
    for error in together(2, lambda rank: ShardedStore(tmp_path / "c", rank).recover()):
        assert "has format 99" in str(error)
    assert path.exists()
    path = save(tmp_path / "d", 2, 1, (2, 1))
    index = path / "slices.json"
    index.write_bytes(index.read_bytes().replace(b'"format":1', b'"format":7'))
    entries = manifest.read(path)
    written = atomic.sha256(index.read_bytes()).hexdigest()
    entries["slices.json"] = manifest.Entry("slices", index.stat().st_size, written)
    (path / manifest.NAME).unlink()
    manifest.write(path, entries)
    with pytest.raises(CheckpointError, match=r"slices.json has format 7, .* use the version that wrote it"):
        Store(path.parent).load(path)


def test_saving_a_name_again_replaces_it_and_purging_keeps_two(tmp_path):
    def one(rank):
        store = ShardedStore(tmp_path / "c", rank)
        for number, value in [(1, 1), (2, 2), (3, 3), (3, 9), (4, 4)]:
            planned = store.plan(f"step-{number:08d}", held(value, rank.rank, 2, 1), {})
            path = store.commit(planned)
            if rank.rank == 0 and number == 3:
                assert equal(Store(path.parent).load(path).tensors, value)
        return store.purge(RetentionPolicy(2))

    assert all_fine(together(2, one)) == [[], []]
    assert Store(tmp_path / "c").names() == ["step-00000003", "step-00000004"]
    fresh = all_fine(together(2, lambda rank: save_one(tmp_path / "c", rank, 4)))
    assert fresh[0].name == "step-00000004"


def test_leftovers_of_killed_saves_go(tmp_path):
    path = save(tmp_path / "c", 2, 1, (2, 1))
    (tmp_path / "c" / ".tmp-step-00000002-ab").mkdir()
    found = all_fine(together(2, lambda rank: ShardedStore(tmp_path / "c", rank).recover()))
    assert [each.notices for each in found] == [["removed .tmp-step-00000002-ab, left over from a killed run"]] * 2
    assert [p.name for p in path.parent.iterdir()] == ["step-00000001"]


def test_a_checkpoint_of_one_process_goes_on_in_many(tmp_path):
    store = WholeStore(tmp_path / "c")
    save_alone(store, 1)
    found = all_fine(together(2, lambda rank: ShardedStore(tmp_path / "c", rank).recover()))
    with opened(found[1].path) as reader:
        assert torch.equal(reader.read("model", "w", Region((1, 2), (2, 2))), torch.full((2, 2), 1.0))
    all_fine(together(2, lambda rank: save_one(tmp_path / "c", rank, 2)))
    assert store.recover().path.name == "step-00000002"


def test_one_process_saves_alone(tmp_path):
    store = ShardedStore(tmp_path / "c", ALONE)
    path = store.commit(store.plan("step-00000001", held(1, 0, 1, 1), {"state": {}}))
    assert equal(Store(tmp_path / "c").load(path).tensors, 1)
    assert store.recover().path == path
    assert json.loads((path / "state.json").read_bytes()) == {}


def flip(path, position, bit=0):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(bytes(data))


def test_500_flipped_bits_are_all_refused(tmp_path):
    """By the shared reading and by a single reader; over all files, the manifest among them."""
    path = save(tmp_path / "c", 4, 1, (2, 2))
    files = sorted(file for file in path.rglob("*") if file.is_file())
    chance = random.Random(5)
    for number in range(500):
        file = files[number % len(files)]
        position, bit = chance.randrange(file.stat().st_size), chance.randrange(8)
        flip(file, position, bit)
        reports = [sharded.verified(path, rank, 2) for rank in range(2)]
        with pytest.raises(CheckpointError):
            sharded.judge(reports)
        if number % 25 == 0:
            with pytest.raises(CheckpointError):
                Store(path.parent).load(path)
        flip(file, position, bit)
    assert equal(Store(path.parent).load(path).tensors, 1)
