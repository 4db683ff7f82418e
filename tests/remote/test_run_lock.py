"""One run at a time in a place in a store: who is in, who may take over, who finds out that he is out."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from buckets import either, moto, run, s3_run  # noqa: F401 (fixtures)
from faulty_store import SHORT, Faults

from daguerre import errors
from daguerre.checkpoint.run_dir import RunFolderError, RunFolderInUse
from daguerre.remote import lock
from daguerre.remote.lock import NAME, Lock, check_not_held, holder
from daguerre.storage import clients


@pytest.fixture
def said() -> list[str]:
    return []


def of_another_machine(run, **more):  # noqa: F811
    """A lock that somebody far away holds."""
    about = {"pid": 1234, "host": "far", "since": "2026-01-01T10:00:00+00:00", "token": "x", "boot": "other"}
    run.write(NAME, json.dumps(about | more).encode())


def test_a_lock_is_held_told_and_let_go(either, said):  # noqa: F811
    assert holder(either) is None
    with Lock(either, said.append).held():
        found = holder(either)
        assert found is not None
        assert found.pid == os.getpid()
        with pytest.raises(RunFolderInUse, match=f"in use by process {os.getpid()} on ") as caught:
            check_not_held(either)
        assert caught.value.exit_code == errors.HELD
    assert holder(either) is None
    assert either.listing() == []
    assert said == []


def test_a_second_run_is_refused_and_leaves_the_first_alone(run, said):  # noqa: F811
    first = Lock(run, said.append)
    with first.held():
        with pytest.raises(RunFolderInUse, match="in use by process"), Lock(run, said.append).held():
            pass
        first.confirm()
        assert [one.name for one in run.listing()] == [NAME]
    assert said == []


def test_a_lock_that_is_not_refreshed_is_taken_over(run, said, monkeypatch):  # noqa: F811
    of_another_machine(run)
    with pytest.raises(RunFolderInUse, match="process 1234 on far"), Lock(run, said.append).held():
        pass
    monkeypatch.setattr(lock, "age_seconds", lambda run: lock.STALE_SECONDS + 1)
    with Lock(run, said.append).held():
        pass
    assert "took over" in said[0]
    assert "from process 1234 on far" in said[0]


def test_age_is_told_by_the_stores_clock(either, monkeypatch):  # noqa: F811
    of_another_machine(either)
    first = either.changed(NAME)
    changed = type(either).changed
    late = timedelta(seconds=500)
    monkeypatch.setattr(type(either), "changed", lambda self, n: first if n == NAME else changed(self, n) + late)
    assert 500 <= lock.age_seconds(either) < 520
    assert [one.name for one in either.listing()] == [NAME]


def test_a_lock_of_a_process_of_this_machine_that_is_dead_is_taken_over_at_once(run, said):  # noqa: F811
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    other.start()
    try:
        assert other.pid is not None
        of_another_machine(run, **lock._process(other.pid), pid=other.pid, host="here")
        with pytest.raises(RunFolderInUse, match=f"process {other.pid} on here"), Lock(run, said.append).held():
            pass
    finally:
        other.kill()
        other.join()
    with Lock(run, said.append).held():
        pass
    assert "its process is dead" in said[0]


def test_a_process_number_that_was_given_anew_is_another_process(run, said):  # noqa: F811
    of_another_machine(run, **{**lock._process(os.getpid()), "started": "1"}, pid=os.getpid())
    with Lock(run, said.append).held():
        pass
    assert "its process is dead" in said[0]


def test_who_was_taken_over_finds_out_and_touches_nothing(run, said, monkeypatch):  # noqa: F811
    slept = Lock(run, said.append)
    with slept.held():
        monkeypatch.setattr(lock, "age_seconds", lambda run: lock.STALE_SECONDS + 1)
        monkeypatch.setattr(lock, "_is_dead", lambda holder: False)
        with Lock(run, said.append).held():
            with pytest.raises(RunFolderInUse, match="was taken over by process"):
                slept.confirm()
            with pytest.raises(RunFolderInUse):
                slept.confirm()
            there = run.read(NAME)[0]
        assert run.listing() == []
        of_another_machine(run)
        assert there != run.read(NAME)[0]
    assert [one.name for one in run.listing()] == [NAME], "who lost the lock does not remove another's"


def test_a_lock_that_somebody_removed_is_made_again(run, said):  # noqa: F811
    mine = Lock(run, said.append)
    with mine.held():
        run.delete([NAME])
        mine.confirm()
        assert holder(run) is not None


def test_it_is_refreshed_while_it_is_held(run, said, monkeypatch):  # noqa: F811
    monkeypatch.setattr(lock, "REFRESH_SECONDS", 0.02)
    with Lock(run, said.append).held():
        seen, until = set(), time.monotonic() + 5
        while len(seen) < 4 and time.monotonic() < until:
            seen.add(json.loads(run.read(NAME)[0])["write"])
        assert len(seen) == 4


def test_one_who_missed_to_write_the_lock_is_waited_for(run, said, monkeypatch):  # noqa: F811
    of_another_machine(run)
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0.01)
    ages = iter([lock.MISSED_SECONDS + 1, lock.STALE_SECONDS - 1, lock.STALE_SECONDS + 1])
    monkeypatch.setattr(lock, "age_seconds", lambda run: next(ages))
    with Lock(run, said.append).held():
        pass
    assert "takes over if that reaches 120 s" in said[0]
    assert "took over" in said[1]


def test_one_who_was_slow_keeps_the_lock(run, said, monkeypatch):  # noqa: F811
    of_another_machine(run)
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0.01)
    ages = iter([lock.MISSED_SECONDS + 1, lock.STALE_SECONDS - 1, 3])
    monkeypatch.setattr(lock, "age_seconds", lambda run: next(ages))
    with pytest.raises(RunFolderInUse, match="process 1234 on far"), Lock(run, said.append).held():
        pass


def test_a_job_that_was_started_again_waits_for_what_was_left_of_it(run, said, monkeypatch):  # noqa: F811
    of_another_machine(run)
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0.01)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    check_not_held(run)
    ages = iter([1, 2, 119, lock.STALE_SECONDS + 1])
    monkeypatch.setattr(lock, "age_seconds", lambda run: next(ages))
    with Lock(run, said.append).held():
        pass
    assert "took over" in said[1]
    of_another_machine(run)
    ages = iter([1, 15, 2])
    with pytest.raises(RunFolderInUse, match="process 1234 on far"), Lock(run, said.append).held():
        pass


def test_a_lock_that_is_let_go_while_it_is_waited_for_is_taken(run, said, monkeypatch):  # noqa: F811
    of_another_machine(run)
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0.01)
    ages = iter([lock.MISSED_SECONDS + 1, 0])

    def age(run):
        seconds = next(ages)
        if not seconds:
            run.delete([NAME])
        return seconds

    monkeypatch.setattr(lock, "age_seconds", age)
    with Lock(run, said.append).held():
        pass
    assert run.listing() == []


@pytest.mark.parametrize("ignored", ["create", "replace"])
def test_a_store_that_ignores_conditions_is_refused(run, said, monkeypatch, ignored):  # noqa: F811
    def careless(self, name, data, *version):
        self.write(name, data)
        return self.read(name)[1]

    monkeypatch.setattr(type(run), ignored, careless)
    with pytest.raises(RunFolderError, match="ignores the conditions"), Lock(run, said.append).held():
        pass
    assert run.listing() == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["error", "cut", "upload", "flip"])
def test_a_bad_line_costs_nobody_the_lock(s3_run, moto, said, monkeypatch, kind):  # noqa: F811
    monkeypatch.setattr(lock, "REFRESH_SECONDS", 0.05)
    mine = Lock(s3_run, said.append)
    with mine.held():
        moto.proxy.faults = Faults(share=0.3, kinds=(kind,))
        for _ in range(20):
            mine.confirm()
            with pytest.raises(RunFolderInUse):
                check_not_held(s3_run)
        moto.proxy.faults = Faults()
    assert said == []
    assert NAME not in [one.name for one in s3_run.listing()]


def test_a_store_that_is_gone_is_told_once(s3_run, moto, said, monkeypatch):  # noqa: F811
    monkeypatch.setattr(lock, "REFRESH_SECONDS", 0.02)
    monkeypatch.setattr(lock, "STALE_SECONDS", 0.1)
    monkeypatch.setattr(clients, "PATIENCE", replace(SHORT, attempts=2))
    clients.forget()
    with Lock(s3_run, said.append).held():
        moto.proxy.faults = Faults(share=1, kinds=("error",))
        until = time.monotonic() + 5
        while not said and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.2)
        moto.proxy.faults = Faults()
    assert len(said) == 1
    assert "cannot be refreshed" in said[0]
