"""The files of a run: sent as they change, brought to another machine, read there while the run goes on."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from buckets import either, moto, run, s3_run  # noqa: F401 (fixtures)
from faulty_store import SHORT, Faults
from layouts import held

from daguerre.checkpoint.export import replaced
from daguerre.checkpoint.run_dir import RunFolder, RunFolderError, RunFolderInUse, lock_holder
from daguerre.errors import UserError
from daguerre.generation import loras
from daguerre.models.lora_files import read
from daguerre.ranks import ALONE
from daguerre.remote import export, local_copy, mirror, sealed_files
from daguerre.remote.mirror import Mirror
from daguerre.remote.run import RemoteStorage
from daguerre.run import storage
from daguerre.run.state_io import store
from daguerre.storage import clients


@pytest.fixture(autouse=True)
def own_machine(tmp_path, monkeypatch):
    machine(monkeypatch, tmp_path / "machine")


def machine(monkeypatch, cache: Path) -> None:
    """Another machine is one with another cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def fill(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def text_of(run, name):  # noqa: F811
    return run.read(name)[0].decode()


def home(run, said=None):  # noqa: F811
    return RemoteStorage(run, (said if said is not None else []).append)


FILES = {
    "config.yaml": "run_name: x\n",
    "metrics/metrics.jsonl": '{"step": 1}\n',
    "samples/step-00000001/0.png": "image",
    "data.json": "{}",
    "status.json": '{"state": "running"}',
}


def test_a_run_goes_on_with_its_files_on_another_machine(either, tmp_path, monkeypatch):  # noqa: F811
    first = home(either)
    path = first.folder.path
    with first.hold():
        fill(path, FILES | {".config.yaml.tmp": "half", "samples/.new-1/0.png": "half"})
    assert {one.name: text_of(either, one.name) for one in either.listing()} == FILES
    machine(monkeypatch, tmp_path / "other")
    then = home(either)
    assert then.folder.path != path
    with then.hold():
        assert {name: (then.folder.path / name).read_text() for name in FILES} == FILES
        with then.folder.metrics.open("a") as file:
            file.write('{"step": 2}\n')
    assert text_of(either, "metrics/metrics.jsonl") == '{"step": 1}\n{"step": 2}\n'
    machine(monkeypatch, tmp_path / "machine")
    fill(first.folder.path, {"metrics/metrics.jsonl": "newer than the store's", "samples/stray.png": "x"})
    with home(either).hold():
        assert first.folder.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'
        assert not (first.folder.path / "samples/stray.png").exists()


def test_changes_are_sent_while_it_runs(run, monkeypatch):  # noqa: F811
    monkeypatch.setattr(mirror, "EVERY_SECONDS", 0.02)
    mine = home(run)
    with mine.hold():
        for text in ("one", "two", "three"):
            fill(mine.folder.path, {"status.json": text})
            until = time.monotonic() + 5
            while time.monotonic() < until:
                names = [one.name for one in run.listing()]
                if "status.json" in names and text_of(run, "status.json") == text:
                    break
            else:
                pytest.fail("never sent")


def test_what_did_not_change_is_not_sent_again(s3_run, moto):  # noqa: F811
    mine = home(s3_run)
    with mine.hold():
        fill(mine.folder.path, FILES)
        mine.before_commit()
        moto.proxy.seen.clear()
        mine.before_commit()
        assert [seen.path.rpartition("/")[2] for seen in moto.proxy.seen if seen.method == "PUT"] == [".lock"]


def test_what_a_checkpoint_needs_is_there_before_it(run):  # noqa: F811
    mine = home(run)
    with mine.hold():
        fill(mine.folder.path, FILES)
        saving = store(mine, ALONE)
        saving.commit(saving.plan("step-00000001", held(1, 0, 1, 1), {}))
        there = [one.name for one in run.listing()]
        assert "metrics/metrics.jsonl" in there
        assert "config.yaml" in there
        assert "checkpoints/step-00000001/manifest.json" in there
        assert "data.json" not in there, "it says that samples and export are there: it comes after them"


def test_a_reader_gets_the_old_export_or_the_new_one(run, tmp_path, monkeypatch):  # noqa: F811
    """Exports follow one another while others fetch: each gets one whole one."""
    where, over, found, number = RunFolder(tmp_path / "work"), threading.Event(), [], 0
    sending = Mirror(run, where, lambda text: None)

    def new(number: int) -> None:
        with replaced(where.pipeline) as fresh:
            for name in ("model_index.json", "unet/a.bin", "unet/b.bin", "vae/c.bin"):
                fill(fresh, {name: f"{number} " * 100})

    def read(reader: int) -> None:
        folder = tmp_path / f"reader{reader}" / "pipeline"
        while not over.is_set():
            assert export.fetch(run, folder)
            texts = {path.read_text() for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"}
            found.append(texts)

    new(0)
    sending._push(patient=False)
    readers = [threading.Thread(target=read, args=(reader,)) for reader in range(2)]
    for reader in readers:
        reader.start()
    until = time.monotonic() + 30.0
    while time.monotonic() < until and (number < 6 or len(found) < 6):
        number += 1
        new(number)
        sending._push(patient=False)
    over.set()
    for reader in readers:
        reader.join()
    assert number > 2
    assert len(found) > 2
    assert all(len(texts) == 1 for texts in found)
    left = {one.name.split("/")[1] for one in run.listing("pipeline/")}
    assert len(left) == 2, "the manifest and one attempt"


def test_an_export_that_is_replaced_on_the_disk_while_it_is_sent_is_not_mixed(run, tmp_path, monkeypatch):  # noqa: F811
    where = RunFolder(tmp_path / "work")
    fill(where.pipeline, {"a.bin": "old", "b.bin": "old"})
    send, done = type(run).send, []

    def slow(self, name, *given):
        if name.endswith("b.bin") and not done:
            done.append(1)
            with replaced(where.pipeline) as fresh:
                fill(fresh, {"a.bin": "new", "b.bin": "new"})
        return send(self, name, *given)

    monkeypatch.setattr(type(run), "send", slow)
    sending = Mirror(run, where, lambda text: None)
    sending._push(patient=False)
    assert not export.fetch(run, tmp_path / "copy" / "pipeline")
    sending._push(patient=False)
    assert export.fetch(run, tmp_path / "copy" / "pipeline")
    assert {(tmp_path / "copy" / "pipeline" / name).read_text() for name in ("a.bin", "b.bin")} == {"new"}


def test_two_runs_on_one_address(run, tmp_path, monkeypatch):  # noqa: F811
    with home(run).hold():
        with pytest.raises(RunFolderInUse, match="in use by process"), home(run).hold():
            pass
        machine(monkeypatch, tmp_path / "other")
        with pytest.raises(RunFolderInUse, match=r"(gs|s3)://.*run is in use by process"), home(run).hold():
            pass
        with pytest.raises(RunFolderInUse):
            home(run).check_not_held()
        machine(monkeypatch, tmp_path / "machine")
    with home(run).hold():
        pass
    assert run.listing() == []


def test_a_fault_is_told_once_and_training_goes_on(s3_run, moto, monkeypatch):  # noqa: F811
    monkeypatch.setattr(mirror, "EVERY_SECONDS", 0.02)
    monkeypatch.setattr(clients, "PATIENCE", replace(SHORT, attempts=2))
    clients.forget()
    said: list[str] = []
    mine = home(s3_run, said)
    with mine.hold():
        moto.proxy.faults = Faults(share=1.0, kinds=("error",))
        fill(mine.folder.path, FILES)
        until = time.monotonic() + 5
        while not said and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.3)
        moto.proxy.faults = Faults()
        while len(said) < 2 and time.monotonic() < until:
            time.sleep(0.02)
    assert len(said) == 2
    assert "cannot be sent" in said[0]
    assert "HTTP 50" in said[0]
    assert "sent to" in said[1]
    assert text_of(s3_run, "status.json") == FILES["status.json"]


def test_another_who_writes_the_same_export_does_not_stop_the_mirror(run, monkeypatch):  # noqa: F811
    monkeypatch.setattr(mirror, "EVERY_SECONDS", 0.02)
    said: list[str] = []
    mine, real, again = home(run, said), export.send, []

    def conflict(*given):
        if not again:
            again.append(1)
            raise sealed_files.Conflict("another process wrote it")
        return real(*given)

    monkeypatch.setattr(export, "send", conflict)
    with mine.hold():
        fill(mine.folder.pipeline, {"model_index.json": "{}"})
        until = time.monotonic() + 10
        while len(said) < 2 and time.monotonic() < until:
            time.sleep(0.02)
    assert "another process wrote it" in said[0]
    assert "are sent to" in said[1]
    assert sealed_files.SealedFiles(run / "pipeline").read() is not None


def test_a_store_that_is_gone_at_the_end_is_the_runs_error(s3_run, moto, monkeypatch):  # noqa: F811
    monkeypatch.setattr(clients, "PATIENCE", replace(SHORT, attempts=2))
    clients.forget()
    mine = home(s3_run)

    def works() -> None:
        fill(mine.folder.path, FILES)
        moto.proxy.faults = Faults(share=1.0, kinds=("error",))

    with pytest.raises(RunFolderError, match="the last files of the run could not be sent") as caught, mine.hold():
        works()
    assert str(mine.folder.path) in str(caught.value)


def test_an_error_of_the_run_is_not_hidden_by_one_of_the_store(s3_run, moto, monkeypatch):  # noqa: F811
    monkeypatch.setattr(clients, "PATIENCE", replace(SHORT, attempts=2))
    clients.forget()

    def fails() -> None:
        fill(mine.folder.path, FILES)
        moto.proxy.faults = Faults(share=1.0, kinds=("error",))
        raise ZeroDivisionError

    mine = home(s3_run)
    with pytest.raises(ZeroDivisionError), mine.hold():
        fails()


def test_a_bucket_that_is_not_there_is_refused_before_anything(s3_run):  # noqa: F811
    with pytest.raises(RunFolderError, match=r"output_dir: s3://nowhere/.* is in a bucket that does not exist"):
        storage.of("s3://nowhere/runs", "x").hold().__enter__()


def test_readers_have_a_copy_of_their_own(run, tmp_path, monkeypatch):  # noqa: F811
    mine = home(run)
    with mine.hold():
        fill(mine.folder.path, FILES)
        saving = store(mine, ALONE)
        for number in (1, 2):
            saving.commit(saving.plan(f"step-{number:08d}", held(number, 0, 1, 1), {}))
        mine._mirror._push(patient=False)
        copy = local_copy.located(run.url)
        assert copy != mine.folder.path
        assert {name: (copy / name).read_text() for name in FILES} == FILES
        holder = lock_holder(copy)
        assert holder is not None
        assert holder.pid == os.getpid()
        assert local_copy.display_name(copy) == run.url
        assert local_copy.fetch(copy) == []
        assert [one.name for one in (copy / "checkpoints").glob("step-*")] == ["step-00000002"]
        local_copy.fetch(copy, "step-00000001")
        assert len(list((copy / "checkpoints").glob("step-*"))) == 2
    assert lock_holder(local_copy.located(run.url)) is None
    run.delete(["samples/step-00000001/0.png"])
    assert not (local_copy.located(run.url) / "samples/step-00000001/0.png").exists()
    with pytest.raises(UserError, match="has no pipeline folder"):
        local_copy.located(f"{run.url}/pipeline/")
    with mine.hold():
        fill(mine.folder.pipeline, {"model_index.json": "{}"})
        fill(mine.folder.adapter, {"kohya.safetensors": "a"})
    assert (local_copy.located(f"{run.url}/pipeline") / "model_index.json").read_text() == "{}"
    assert (local_copy.located(f"{run.url}/adapter") / "kohya.safetensors").read_text() == "a"
    for place in (run.url, f"{run.url}/adapter"):
        assert read.find(loras.located(place)).read_text() == "a", "use='{s3://...: 1}'"


def test_where_there_is_no_run(run):  # noqa: F811
    with pytest.raises(UserError, match=r"is not a run folder"):
        local_copy.located(run.url)
    assert local_copy.located("some/folder") == Path("some/folder")


def test_large_files_that_grow_are_sent_less_often(run, monkeypatch):  # noqa: F811
    mine = home(run)
    monkeypatch.setattr(mirror, "_BYTES_A_SECOND", 10)
    with mine.hold():
        fill(mine.folder.path, {"metrics/metrics.jsonl": "x" * 1000, "config.yaml": "a"})
        mine._mirror._push(patient=True)
        fill(mine.folder.path, {"metrics/metrics.jsonl": "x" * 1001})
        mine._mirror._push(patient=True)
        assert len(text_of(run, "metrics/metrics.jsonl")) == 1000
        mine.before_commit()
        assert len(text_of(run, "metrics/metrics.jsonl")) == 1001
