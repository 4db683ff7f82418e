"""Checkpoints come back bit-equal, damage is named and passed over, what is old goes only when newer ones are sound."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load
from tiny_checkpoints import content, same, save
from whole_store import WholeStore

from daguerre.checkpoint import manifest, safetensors
from daguerre.checkpoint.manifest import CheckpointError, Damaged
from daguerre.checkpoint.retention import RetentionPolicy
from daguerre.errors import UserError


@pytest.fixture
def store(tmp_path):
    return WholeStore(tmp_path / "run" / "checkpoints")


def fresh(store):
    """As another process would see it: nothing known to be sound."""
    return WholeStore(store.root)


def flip(path, position=-1, bit=0):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(bytes(data))


FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "config.json", "tokenizer/vocab.json"]


@pytest.mark.parametrize("dtype", safetensors._DTYPES, ids=str)
def test_every_dtype_comes_back_bit_equal(store, dtype):
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6, 8), dtype=torch.uint8)
    values = raw.view(dtype) if dtype is not torch.bool else raw.bool()
    group = {
        "plain": values,
        "scalar": values[0, 0].clone(),
        "empty": torch.empty(0, 3, dtype=dtype),
        "transposed": values.T,
        "part": values[:, ::2] if values.shape[1] > 1 else values[::2],
        "odd": torch.ones(3, dtype=torch.uint8),
    }
    path = store.save("step-00000001", {"model": group}, {})
    for loaded in (store.load(path).tensors["model"], load(b"".join(safetensors.encode(group)))):
        assert set(loaded) == set(group)
        for key, expected in group.items():
            assert loaded[key].dtype == expected.dtype
            assert loaded[key].shape == expected.shape
            bits = loaded[key].reshape(-1).view(torch.uint8), expected.contiguous().reshape(-1).view(torch.uint8)
            assert torch.equal(*bits), key


def test_shared_tensors_and_parameters_are_saved_each(store):
    weight = torch.nn.Parameter(torch.randn(4, 4))
    path = store.save("step-00000001", {"model": {"a": weight, "b": weight, "row": weight[1]}}, {})
    loaded = store.load(path).tensors["model"]
    assert torch.equal(loaded["a"], weight)
    assert torch.equal(loaded["b"], weight)
    assert torch.equal(loaded["row"], weight[1])
    assert not loaded["a"].requires_grad


def test_everything_comes_back_and_equal_content_gives_equal_files(store, tmp_path):
    path = save(store, 7)
    assert same(store.load(path), 7)
    again = save(WholeStore(tmp_path / "other"), 7)
    for file in [*FILES, manifest.NAME]:
        assert (path / file).read_bytes() == (again / file).read_bytes()
    assert [p.name for p in store.root.iterdir()] == ["step-00000007"]


def test_the_order_of_the_commit(store, monkeypatch):
    """Each file, the manifest and the folders are safe on disk before the rename, the parent after it."""
    store.root.mkdir(parents=True)
    events = []
    fsync, rename = os.fsync, os.rename

    def seen_fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        events.append(
            os.path.relpath(path, store.root).partition("/")[2] if ".tmp-" in path else os.path.basename(path)
        )
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    save(store, 1)
    *files, own, folder, renamed, parent = events
    assert set(files) >= {*FILES, "tokenizer"}
    assert files.index("tokenizer") > files.index("tokenizer/vocab.json")
    assert (own, folder, renamed, parent) == (manifest.NAME, "", "rename", "checkpoints")


def test_floats_in_documents_come_back_exact(store):
    numbers = [0.1, 1e-300, 2**53 + 1, -0.0, 3.141592653589793]
    assert store.load(store.save("step-1", {}, {"state": numbers})).documents["state"] == numbers


def test_only_the_groups_asked_for_are_read(store):
    path = save(store, 1)
    flip(path / "optimizer.safetensors")
    assert set(store.load(path, only=("model",)).tensors) == {"model"}
    with pytest.raises(CheckpointError, match="no tensors named ema; it has model"):
        store.load(path, only=("model", "ema"))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"documents": {"state": {"loss": float("nan")}}}, "'state' cannot be saved: Out of range float"),
        ({"documents": {"state": {1: 2}}}, "key that is no string"),
        ({"documents": {"state": {"x": {1, 2}}}}, "not JSON serializable"),
        ({"documents": {"manifest": {}}}, "manifest.json"),
        ({"documents": {"../state": {}}}, "'../state'"),
        ({"tensors": {"model": {"c": torch.zeros(2, dtype=torch.complex64)}}}, "'c' is torch.complex64"),
        ({"files": {"../x": b""}}, "'../x'"),
        ({"files": {"/etc/x": b""}}, "'/etc/x'"),
        ({"files": {"a//b": b""}}, "'a//b'"),
        ({"files": {"a\\b": b""}}, "unsafe"),
        ({"files": {"model.safetensors": b""}}, "'model.safetensors'"),
    ],
)
def test_what_could_not_be_read_back_is_refused_before_anything_is_written(store, bad, message):
    with pytest.raises(ValueError, match=message):
        store.save("step-00000001", **{**content(1), **bad})
    assert not store.root.exists()


@pytest.mark.parametrize("file", [*FILES, manifest.NAME])
@pytest.mark.parametrize("position", [0, 9, -2], ids=["start", "inside", "end"])
def test_a_flipped_bit_is_refused_by_name_and_the_one_before_is_used(store, file, position):
    older, newer = save(store, 1), save(store, 2)
    flip(newer / file, position, bit=2)
    with pytest.raises(Damaged, match=f"step-00000002/{file}"):
        store.load(newer)
    reader = fresh(store).newest_verified()
    assert reader.path == older
    assert newer.exists(), "a reader changes nothing"
    found = fresh(store).recover()
    assert found.path == older
    assert same(store.load(found.path), 1)
    [notice] = found.notices
    aside = store.root / "quarantine" / "step-00000002"
    assert f"step-00000002/{file}" in notice
    assert str(aside) in notice
    assert (aside / file).exists()
    assert file in aside.with_name("step-00000002.txt").read_text()
    assert not newer.exists()


def test_every_bit_of_a_manifest_counts(store):
    path = store.save("step-00000001", {}, {"state": {}})
    data = (path / manifest.NAME).read_bytes()
    for position in range(len(data)):
        flip(path / manifest.NAME, position, bit=position % 8)
        with pytest.raises(Damaged):
            manifest.verify(path)
        (path / manifest.NAME).write_bytes(data)
    manifest.verify(path)


@pytest.mark.parametrize("file", [*FILES, manifest.NAME])
def test_a_cut_or_missing_file_is_refused_by_name(store, file):
    older, newer, newest = save(store, 1), save(store, 2), save(store, 3)
    (newer / file).write_bytes((newer / file).read_bytes()[:-2])
    (newest / file).unlink()
    with pytest.raises(Damaged, match=f"step-00000003/{file} is missing"):
        store.load(newest)
    found = fresh(store).recover()
    assert found.path == older
    assert [f"step-0000000{n}/{file}" in notice for n, notice in zip((3, 2), found.notices, strict=True)] == [True] * 2


def test_damage_while_the_process_runs_is_seen(store):
    older, newer = save(store, 1), save(store, 2)
    assert store.recover().path == newer
    flip(newer / "model.safetensors")
    assert store.recover().path == older


def test_a_second_damaged_one_of_a_name_does_not_replace_the_first_in_quarantine(store):
    for value in (1, 2):
        flip(save(store, 5, value) / "state.json")
        assert store.recover().path is None
    aside = store.root / "quarantine"
    assert {p.name for p in aside.iterdir() if p.is_dir()} == {"step-00000005", "step-00000005.2"}


def test_junk_beside_and_inside_is_left_alone_and_told(store):
    path = save(store, 1)
    (path / ".DS_Store").write_bytes(b"x")
    (store.root / "step-00000009 copy").mkdir()
    (store.root / "notes.txt").write_text("mine")
    found = fresh(store).recover()
    assert found.path == path
    assert found.notices == ["step-00000001 also holds .DS_Store, which it did not save: ignored"]
    assert (store.root / "notes.txt").read_text() == "mine"
    assert (store.root / "step-00000009 copy").exists()
    assert same(store.load(path), 1)


def test_newest_is_by_number(store):
    for step in ("step-99999999", "step-100000000", "step-00000003"):
        store.save(step, {}, {})
    assert store.names() == ["step-00000003", "step-99999999", "step-100000000"]
    assert store.recover().path.name == "step-100000000"


def test_nothing_yet(store):
    assert store.names() == []
    assert store.recover().path is None
    assert store.newest_verified().path is None


def test_leftovers_of_killed_saves_go_and_are_told(store):
    path = save(store, 1)
    stale = store.root / ".tmp-step-00000002-abc"
    shutil.copytree(path, stale)
    found = fresh(store).newest_verified()
    assert stale.exists(), "a reader changes nothing"
    found = fresh(store).recover()
    assert found.path == path
    assert found.notices == ["removed .tmp-step-00000002-abc, left over from a killed run"]
    assert not stale.exists()


def test_saving_a_name_again_replaces_it(store):
    save(store, 1)
    save(store, 2, value=5)
    path = save(store, 2, value=6)
    assert same(store.load(path), 6)
    assert sorted(p.name for p in store.root.iterdir()) == ["step-00000001", "step-00000002"]


def test_saving_over_a_damaged_name_keeps_the_damaged_one_in_quarantine(store):
    flip(save(store, 2, value=5) / "state.json")
    assert same(store.load(save(store, 2, value=6)), 6)
    assert (store.root / "quarantine" / "step-00000002" / "state.json").exists()


def test_a_replacement_cut_between_its_renames_is_put_back(store):
    save(store, 1)
    path = save(store, 2)
    path.rename(store.root / ".replaced-step-00000002")
    found = fresh(store).recover()
    assert found.path == path
    assert "is restored" in found.notices[0]
    assert same(store.load(path), 2)


def test_purge_keeps_the_newest(store):
    for number in range(6):
        save(store, number)
    assert store.purge(RetentionPolicy(3)) == []
    assert store.names() == ["step-00000003", "step-00000004", "step-00000005"]


def test_purge_never_goes_below_two_sound_ones(store):
    for number in range(4):
        save(store, number)
    flip(store.root / "step-00000003" / "model.safetensors")
    flip(store.root / "step-00000001" / "state.json")
    notices = store.purge(RetentionPolicy(2))
    assert store.names() == ["step-00000000", "step-00000002"]
    assert ["step-00000003/model.safetensors" in notices[0], "step-00000001/state.json" in notices[1]] == [True] * 2
    for keep in (1, 0):
        with pytest.raises(ValueError, match="at least 2"):
            store.purge(RetentionPolicy(keep))


def test_a_newer_format_is_an_error_not_damage(store, monkeypatch):
    save(store, 1)
    monkeypatch.setattr(manifest, "FORMAT", 2)
    path = save(store, 2)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format 2, this version of daguerre reads 1"):
        fresh(store).recover()
    assert path.exists()


def test_a_manifest_cannot_point_outside(store):
    (store.root.parent).mkdir(parents=True)
    (store.root.parent / "secret").write_bytes(b"x")
    path = save(store, 1)
    inside = json.loads((path / manifest.NAME).read_bytes())["files"]["state.json"]
    (path / manifest.NAME).unlink()
    manifest.write(path, {"../../secret": manifest.Entry(**inside)})
    with pytest.raises(CheckpointError, match="outside its folder"):
        store.load(path)


def test_errors_are_the_users_to_read():
    assert issubclass(CheckpointError, UserError)


def test_rewinding_sets_newer_ones_aside_and_refuses_names_that_are_not_there(store):
    for number in (1, 2, 3):
        save(store, number)
    with pytest.raises(CheckpointError, match=r"no checkpoint 'step-00000009'.*step-00000001, .*step-00000003"):
        store.rewind("step-00000009")
    found = store.rewind("step-00000001")
    assert found.path == store.root / "step-00000001"
    assert store.names() == ["step-00000001"]
    assert sorted(p.name for p in (store.root / "quarantine").iterdir() if p.is_dir()) == [
        "step-00000002",
        "step-00000003",
    ]
    assert "continued from step-00000001" in found.notices[0]
    assert fresh(store).recover().path == found.path


def test_rewinding_to_a_damaged_one_moves_nothing(store):
    for number in (1, 2):
        save(store, number)
    flip(store.root / "step-00000001" / "model.safetensors")
    with pytest.raises(Damaged, match=r"model\.safetensors"):
        fresh(store).rewind("step-00000001")
    assert store.names() == ["step-00000001", "step-00000002"]
