"""Checkpoints in a bucket: whole or absent, verified, any ranks on any machine; what is damaged, left or in the way."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from buckets import either, moto, run, s3_run  # noqa: F401 (fixtures)
from faulty_store import SHORT, Faults
from layouts import equal, held, read_alike
from rank_threads import all_fine, together

from daguerre.checkpoint import manifest
from daguerre.checkpoint.async_save import FailedSaves, Saver
from daguerre.checkpoint.manifest import CheckpointError, Damaged
from daguerre.checkpoint.retention import RetentionPolicy
from daguerre.checkpoint.run_dir import RunFolderInUse
from daguerre.checkpoint.shard_reader import opened
from daguerre.checkpoint.store import Store
from daguerre.ranks import ALONE
from daguerre.remote.checkpoint_store import RemoteStore
from daguerre.storage import clients

MESH = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2)}


def alone(run, root):  # noqa: F811
    return RemoteStore(root / "checkpoints", ALONE, run)


def save(store, number, value=None):
    """`step-NUMBER` with the content of `value` (its number unless given)."""
    value = number if value is None else value
    groups = held(value, store.ranks.rank, *MESH[store.ranks.count])
    return store.commit(store.plan(f"step-{number:08d}", groups, {"state": {"value": value}}, {"a/b.txt": b"x" * 9}))


def value_of(path):
    """Of the one save that a loaded folder is; it is verified once more."""
    manifest.verify(path)
    loaded = Store(path.parent).load(path)
    assert equal(loaded.tensors, loaded.documents["state"]["value"]), "a mixture"
    assert loaded.files == {"a/b.txt": b"x" * 9}
    return loaded.documents["state"]["value"]


def files(run, name, ending=""):  # noqa: F811
    return [one.name for one in run.listing(f"checkpoints/{name}/") if one.name.endswith(ending)]


def flip(run, name):  # noqa: F811
    data = bytearray(run.read(name)[0])
    data[len(data) // 2] ^= 1
    run.write(name, bytes(data))


def test_what_is_saved_is_found_on_another_machine(either, tmp_path):  # noqa: F811
    here, there = alone(either, tmp_path / "here"), alone(either, tmp_path / "there")
    for number in (1, 2):
        save(here, number)
    assert there.names() == ["step-00000001", "step-00000002"]
    found = there.recover()
    assert found.path is not None
    assert value_of(found.path) == 2
    assert found.notices == []
    assert there.newest_verified().path == found.path


def test_an_empty_place_has_no_checkpoint(run, tmp_path):  # noqa: F811
    store = alone(run, tmp_path)
    assert store.names() == []
    assert store.recover().path is None
    with pytest.raises(CheckpointError, match="there are: none"):
        store.rewind("step-00000001")


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_ranks_that_share_no_disk_save_and_any_others_go_on(s3_run, tmp_path, count):  # noqa: F811
    def first(ranks):
        save(RemoteStore(tmp_path / f"node{ranks.rank}", ranks, s3_run), 7)

    all_fine(together(4, first))

    def then(ranks):
        store = RemoteStore(tmp_path / f"other{ranks.rank}", ranks, s3_run)
        path = store.recover().path
        assert path is not None
        with opened(path) as reader:
            read_alike(reader, 7, ranks.rank, *MESH[count])
        save(store, 8)
        return store.names()

    assert set(map(tuple, all_fine(together(count, then)))) == {("step-00000007", "step-00000008")}


def test_ranks_of_one_machine_fetch_a_file_once(s3_run, moto, tmp_path):  # noqa: F811
    all_fine(together(4, lambda ranks: save(RemoteStore(tmp_path / "a", ranks, s3_run), 1)))
    moto.proxy.seen.clear()
    found = all_fine(together(4, lambda ranks: RemoteStore(tmp_path / "b", ranks, s3_run).recover()))
    assert {value_of(one.path) for one in found} == {1}
    fetched = [seen.path for seen in moto.proxy.seen if seen.method == "GET" and ".safetensors" in seen.path]
    assert len(fetched) == len(set(fetched)) == len(files(s3_run, "step-00000001", ".safetensors"))


def test_what_is_here_already_is_not_fetched_again_unless_it_is_damaged(s3_run, moto, tmp_path):  # noqa: F811
    store = alone(s3_run, tmp_path)
    save(store, 1)
    path = store.recover().path
    moto.proxy.seen.clear()
    assert alone(s3_run, tmp_path).recover().path == path
    assert not [seen for seen in moto.proxy.seen if ".safetensors" in seen.path]
    local = next(path.glob("*.safetensors"))
    local.write_bytes(local.read_bytes()[:-1] + b"?")
    assert value_of(alone(s3_run, tmp_path).recover().path) == 1


@pytest.mark.parametrize("what", ["flip", "cut", "missing", "manifest flip", "manifest cut"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(run, tmp_path, what):  # noqa: F811
    store = alone(run, tmp_path / "a")
    for number in (1, 2):
        save(store, number)
    victim = files(run, "step-00000002", "manifest.json" if "manifest" in what else "state.json")[0]
    if what.endswith("flip"):
        flip(run, victim)
    elif what.endswith("cut"):
        run.write(victim, run.read(victim)[0][:-2])
    else:
        run.delete([victim])
    reading = alone(run, tmp_path / "reader").newest_verified()
    assert value_of(reading.path) == 1
    assert "step-00000002 is skipped" in reading.notices[0]
    assert store.names() == ["step-00000001", "step-00000002"]
    found = alone(run, tmp_path / "b").recover()
    assert value_of(found.path) == 1
    assert "step-00000002 is set aside" in found.notices[0]
    assert store.names() == ["step-00000001"]
    aside = json.loads(run.read(run.listing("checkpoints/quarantine/")[0].name)[0])
    assert aside["name"] == "step-00000002"
    kept = set(files(run, "step-00000002"))
    assert kept, "what was set aside is not deleted"
    save(store, 2, 22)
    assert alone(run, tmp_path / "c").recover().notices == []
    assert value_of(alone(run, tmp_path / "c").recover().path) == 22
    assert kept < set(files(run, "step-00000002")) | {victim}


@pytest.mark.long
def test_every_byte_counts(s3_run, tmp_path):  # noqa: F811
    store = alone(s3_run, tmp_path / "a")
    save(store, 1)
    for name in files(s3_run, "step-00000001"):
        before = s3_run.read(name)[0]
        flip(s3_run, name)
        assert alone(s3_run, tmp_path / name.replace("/", "-")).newest_verified().path is None, name
        s3_run.write(name, before)
    assert value_of(alone(s3_run, tmp_path / "b").newest_verified().path) == 1


def test_going_back_sets_newer_ones_aside(run, tmp_path):  # noqa: F811
    store = alone(run, tmp_path)
    for number in (1, 2, 3):
        save(store, number)
    found = store.rewind("step-00000001")
    assert value_of(found.path) == 1
    assert len(found.notices) == 2
    assert store.names() == ["step-00000001"]
    for number in (2, 3, 4):
        save(store, number, 10 * number)
    store.purge(RetentionPolicy(2))
    assert store.names() == ["step-00000003", "step-00000004"]
    assert files(run, "step-00000002"), "what was set aside stays when a later one of its name is purged"


@pytest.mark.parametrize("form", ["[]", "1", "null", "{", "[" * 100_000, '{"folders": 3}'])
def test_a_damaged_note_keeps_what_it_set_aside(run, tmp_path, form):  # noqa: F811
    store = alone(run, tmp_path)
    for number in (1, 2):
        save(store, number)
    store.rewind("step-00000001")
    kept = set(files(run, "step-00000002"))
    (note,) = run.listing("checkpoints/quarantine/")
    run.write(note.name, form.encode())
    for number in (2, 3, 4):
        save(store, number, 10 * number)
    store.purge(RetentionPolicy(2))
    assert store.names() == ["step-00000003", "step-00000004"]
    assert kept <= set(files(run, "step-00000002"))
    assert alone(run, tmp_path / "b").recover().notices == []


def test_a_name_that_is_saved_again_is_replaced_in_one_step(run, tmp_path):  # noqa: F811
    store = alone(run, tmp_path)
    save(store, 1)
    save(store, 1, 5)
    assert value_of(alone(run, tmp_path / "b").recover().path) == 5
    assert len({name.split("/")[2] for name in files(run, "step-00000001", ".safetensors")}) == 1


def test_what_a_killed_save_left_is_no_checkpoint_and_goes(run, tmp_path):  # noqa: F811
    store = alone(run, tmp_path)
    save(store, 1)
    run.write("checkpoints/step-00000002/0123456789abcdef/model.safetensors", b"half")
    run.write("checkpoints/step-00000001/0123456789abcdef/model.safetensors", b"half")
    run.write("checkpoints/notes.txt", b"mine")
    assert store.names() == ["step-00000001"]
    found = store.recover()
    assert value_of(found.path) == 1
    assert "removed 2 files of step-00000001, step-00000002" in found.notices[0]
    left = [one.name for one in run.listing("checkpoints/") if "0123456789abcdef" in one.name]
    assert left == []
    assert run.read("checkpoints/notes.txt")[0] == b"mine"


def test_purging_keeps_the_newest_that_are_whole(run, tmp_path):  # noqa: F811
    store = alone(run, tmp_path)
    for number in range(1, 6):
        save(store, number)
    flip(run, files(run, "step-00000005", "state.json")[0])
    run.delete([files(run, "step-00000004", "state.json")[0]])
    notices = store.purge(RetentionPolicy(2, interval=None))
    assert store.names() == ["step-00000002", "step-00000003"]
    assert len(notices) == 2
    assert files(run, "step-00000001") == []


def test_copied_objects_have_other_tags_and_are_read_whole(s3_run, moto, tmp_path):  # noqa: F811
    store = alone(s3_run, tmp_path)
    for number in (1, 2, 3):
        save(store, number)
    for name in files(s3_run, "step-00000003", ".json"):
        if "manifest" in name:
            about = json.loads(s3_run.read(name)[0])
            about["stored"]["tags"] = dict.fromkeys(about["stored"]["tags"], '"other"')
            entries = {path: manifest.Entry(**entry) for path, entry in about["files"].items()}
            s3_run.write(name, manifest.to_bytes(entries, about["stored"]))
    assert store.purge(RetentionPolicy(2)) == []
    assert store.names() == ["step-00000002", "step-00000003"]


def test_one_rank_that_cannot_send_is_the_error_of_all(s3_run, tmp_path, monkeypatch):  # noqa: F811
    def broken(ranks):
        store = RemoteStore(tmp_path / f"{ranks.rank}", ranks, s3_run)
        save(store, 1)
        if ranks.rank == 2:
            store._catalog = type(store._catalog)(type(s3_run)("s3://nowhere/run/checkpoints"))
        save(store, 2)

    results = together(3, broken)
    assert all(isinstance(result, CheckpointError) for result in results)
    assert {str(result) for result in results} == {str(results[0])}
    assert "(rank 2)" in str(results[0])
    assert "bucket that does not exist" in str(results[0])
    assert "the newest is step-00000001" in str(results[0])
    assert files(s3_run, "step-00000002") == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["error", "cut", "upload", "flip"])
def test_a_bad_line_hurts_nothing(s3_run, moto, tmp_path, kind):  # noqa: F811
    moto.proxy.faults = Faults(share=0.25, kinds=(kind,))
    store = alone(s3_run, tmp_path / "a")
    for number in (1, 2, 3):
        save(store, number)
    store.purge(RetentionPolicy(2))
    assert value_of(alone(s3_run, tmp_path / "b").recover().path) == 3
    moto.proxy.faults = Faults()
    assert value_of(alone(s3_run, tmp_path / "c").recover().path) == 3


def test_a_store_that_refuses_is_told_counted_and_borne_with(s3_run, moto, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(clients, "PATIENCE", replace(SHORT, attempts=2))
    clients.forget()
    store = alone(s3_run, tmp_path)
    saving = Saver(store, RetentionPolicy(2), FailedSaves(3))
    told = []

    def go(number):
        told.extend(saving.save(f"step-{number:08d}", held(number, 0, 1, 1), {"state": {"value": number}}))

    go(1)
    go(2)
    told.extend(saving.settle())
    moto.proxy.faults = Faults(share=1.0, kinds=("error",), methods=("PUT", "POST"))
    go(3)
    go(4)
    told.extend(saving.settle())
    moto.proxy.faults = Faults()
    go(5)
    told.extend(saving.settle())
    assert [outcome.path is not None for outcome in told] == [True, True, False, False, True]
    assert "SAVE FAILED (2 in a row, 2 in all)" in told[3].notices[-1]
    assert "the newest is step-00000002" in told[3].notices[-1]
    assert told[4].notices == ["saving works again after 2 failed saves"]
    assert store.names() == ["step-00000002", "step-00000005"]
    moto.proxy.faults = Faults(share=1.0, kinds=("error",))
    with pytest.raises(CheckpointError, match="3 saves in a row failed"):
        all(go(number) is None for number in (6, 7, 8, 9))
    moto.proxy.faults = Faults()
    assert store.names() == ["step-00000002", "step-00000005"]


def test_two_that_save_the_same_at_once_do_not_mix(run, tmp_path, monkeypatch):  # noqa: F811
    """A run that was thought dead wakes up while another saves: its manifest comes too late."""
    old, new = alone(run, tmp_path / "old"), alone(run, tmp_path / "new")
    create, done = type(run).create, []

    def late(self, name, data):
        if name == manifest.NAME and not done:
            done.append(name)
            save(new, 2, 22)
        return create(self, name, data)

    monkeypatch.setattr(type(run), "create", late)
    with pytest.raises(CheckpointError, match="another process wrote"):
        save(old, 2)
    assert value_of(alone(run, tmp_path / "b").recover().path) == 22


def test_a_run_that_lost_its_place_saves_nothing_more(run, tmp_path):  # noqa: F811
    store = alone(run, tmp_path)
    save(store, 1)

    def lost():
        raise RunFolderInUse("taken over")

    store.before_commit = lost
    saving = Saver(store)
    saving.save("step-00000002", held(2, 0, 1, 1), {})
    with pytest.raises(RunFolderInUse):
        saving.settle()
    assert store.names() == ["step-00000001"]
    assert files(run, "step-00000002") == []


def test_a_damaged_one_cannot_be_gone_back_to(run, tmp_path):  # noqa: F811
    store = alone(run, tmp_path)
    for number in (1, 2):
        save(store, number)
    flip(run, files(run, "step-00000001", "state.json")[0])
    with pytest.raises(Damaged, match=r"state\.json"):
        store.rewind("step-00000001")
    assert store.names() == ["step-00000001", "step-00000002"]


def test_a_cache_that_cannot_be_written_to_is_said(run, tmp_path):  # noqa: F811
    save(alone(run, tmp_path / "a"), 1)
    (tmp_path / "full").write_text("a file where a folder should be")
    with pytest.raises(CheckpointError, match="XDG_CACHE_HOME can change"):
        alone(run, tmp_path / "full").recover()


@pytest.mark.long
def test_training_does_not_wait_for_a_slow_store(s3_run, moto, tmp_path):  # noqa: F811
    saving = Saver(alone(s3_run, tmp_path), RetentionPolicy(2))
    saving.save("step-00000000", held(0, 0, 1, 1), {"state": {"value": 0}})
    saving.settle()
    moto.proxy.faults = Faults(share=1.0, kinds=("stall",), stall_seconds=0.2, methods=("PUT", "POST"))
    saving.save("step-00000001", held(1, 0, 1, 1), {"state": {"value": 1}}, {"a/b.txt": b"x" * 9})
    (outcome,) = saving.settle()
    assert outcome.path is not None
    assert outcome.stalled_seconds < 0.1 * outcome.wrote_seconds
    assert value_of(alone(s3_run, tmp_path / "b").recover().path) == 1
