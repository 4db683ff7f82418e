"""The queue: what is started, what is left behind by processes that end in any way, and that nothing runs twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from daguerre import errors
from daguerre.checkpoint.atomic import locked
from daguerre.cli import main
from daguerre.errors import Held, UserError
from daguerre.queue import keeper
from daguerre.queue.queue import Queue
from daguerre.queue.runner import Runner

FAKE = (sys.executable, "-S", "-E", str(Path(__file__).with_name("fake_training.py")))


RUNNERS: list[Runner] = []


@pytest.fixture
def queue(tmp_path):
    yield Queue(tmp_path / "queue")
    while RUNNERS:
        for child in RUNNERS.pop()._children:
            child.wait()


def put(queue, name, what="works", devices=1):
    place = str(queue.path.parent / name)
    return queue.add([name, what, place], place, Path(place), queue.path.parent, devices)


def ran(queue):
    path = queue.path.parent / "ran"
    return path.read_text().split() if path.exists() else []


def state(queue, ident):
    return queue.find(ident).state


def runner(queue, devices=("",)):
    RUNNERS.append(Runner(queue, list(devices), FAKE, say=lambda text: None))
    return RUNNERS[-1]


def until(own, condition, seconds=300.0):
    """Lets a runner look until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        own.step()
        time.sleep(0.02)


def test_entries_run_in_order_and_a_failure_stops_nothing(queue):
    idents = [
        put(queue, name, what) for name, what in [("a", "works"), ("b", "fails"), ("c", "killed"), ("d", "works")]
    ]
    own = runner(queue)
    queue.move(idents[3], idents[1])
    until(own, lambda: not any(each.state in ("waiting", "running") for each in queue.entries()))
    assert ran(queue) == ["a", "d", "b", "c"]
    assert [state(queue, ident) for ident in idents] == ["finished", "failed", "interrupted", "finished"]
    assert queue.find(idents[1]).why == "out of memory"
    queue.resume(idents[2])
    until(own, lambda: state(queue, idents[2]) == "interrupted" and ran(queue)[-1] == "c" and len(ran(queue)) == 5)


def test_devices_are_taken_one_by_one_and_given_back(queue):
    first, second, third = put(queue, "a", "waits"), put(queue, "b", "waits", devices=2), put(queue, "c", "works")
    own = runner(queue, ["0", "1"])
    until(own, lambda: ran(queue) == ["a"])
    own.step()
    assert [state(queue, each) for each in (first, second, third)] == ["running", "waiting", "waiting"]
    queue.stop(first)
    until(own, lambda: state(queue, first) == "stopped")
    assert queue.find(first).why == "stopped by SIGTERM"
    queue.pause(second)
    until(own, lambda: state(queue, third) == "finished")
    assert state(queue, second) == "paused"
    queue.resume(second)
    assert state(queue, second) == "waiting"


def test_a_pause_saves_and_a_resume_goes_on(queue):
    ident, own = put(queue, "a", "waits"), runner(queue)
    until(own, lambda: (queue.path.parent / "a" / "status.json").exists())
    assert "saves" in queue.pause(ident)
    until(own, lambda: state(queue, ident) == "paused")
    own.step()
    assert ran(queue) == ["a"]
    queue.resume(ident)
    until(own, lambda: ran(queue) == ["a", "a"])
    until(own, lambda: queue.find(ident).status.get("state") == "running")
    queue.stop(ident)
    until(own, lambda: state(queue, ident) == "stopped")


def test_a_second_stop_kills(queue):
    ident, own = put(queue, "a", "deaf"), runner(queue)
    until(own, lambda: (queue.path.parent / "a" / "status.json").exists())
    queue.stop(ident)
    time.sleep(0.1)
    assert state(queue, ident) == "running"
    queue.stop(ident)
    until(own, lambda: state(queue, ident) == "stopped")
    assert queue.find(ident).why == "killed"


def test_a_stop_that_comes_before_the_training_is_there_is_kept(queue, monkeypatch):
    ident = put(queue, "a", "waits")
    monkeypatch.setattr(keeper, "_LOOK_SECONDS", 0.05)
    queue._change(ident, stops=1)  # as `stop` does while the lock is held, and nobody is there to be signalled
    with (queue.path / f"{ident}.lock").open("w") as lock:
        assert keeper.keep(queue, ident, 1, list(FAKE), lock.fileno()) == 0
    assert state(queue, ident) == "stopped"


def test_a_training_that_hangs_at_its_end_is_ended(queue, monkeypatch):
    ident = put(queue, "a", "hangs")
    monkeypatch.setattr(keeper, "END_SECONDS", 0.5)
    monkeypatch.setattr(keeper, "_LOOK_SECONDS", 0.05)
    lock = os.open(queue.path / f"{ident}.lock", os.O_RDWR | os.O_CREAT)
    try:
        assert keeper.keep(queue, ident, 1, list(FAKE), lock) == 0
    finally:
        os.close(lock)
    assert state(queue, ident) == "finished"


def test_a_training_goes_on_without_its_runner_and_its_keeper(queue):
    ident, own = put(queue, "a", "waits"), runner(queue)
    until(own, lambda: "training" in queue.document(ident, "begun") and ran(queue) == ["a"])
    os.kill(queue.document(ident, "begun")["keeper"], signal.SIGKILL)
    later = runner(queue)
    later.step()
    later.step()
    assert state(queue, ident) == "running"
    os.kill(queue.document(ident, "begun")["training"], signal.SIGKILL)
    until(later, lambda: state(queue, ident) == "interrupted")
    assert ran(queue) == ["a"]


@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.long)])
def test_a_runner_that_is_killed_at_any_moment_loses_nothing_and_runs_nothing_twice(queue, kills):
    names = [f"run{number}" for number in range(max(3, kills // 4))]
    idents = [put(queue, name) for name in names]
    drawn = random.Random(kills)
    command = [sys.executable, str(Path(__file__).with_name("queue_runner.py")), str(queue.path)]
    for _ in range(kills):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while process.poll() is None and not is_run(queue) and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(drawn.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert subprocess.run(command, stdout=subprocess.DEVNULL, timeout=300, check=False).returncode == 0
    assert sorted(ran(queue)) == sorted(names)
    assert {state(queue, ident) for ident in idents} == {"finished"}


def is_run(queue):
    with locked(queue.path / ".runner", wait=False) as free:
        return not free


def test_one_process_runs_a_queue(queue):
    with runner(queue).alone(), pytest.raises(Held), runner(queue).alone():
        raise AssertionError


def test_what_cannot_be_is_refused(queue):
    ident = put(queue, "a")
    with pytest.raises(UserError, match="is in the queue already"):
        put(queue, "a")
    with pytest.raises(UserError, match="there is no entry 'zz'"):
        queue.get("zz")
    with pytest.raises(UserError, match="cannot be stopped"):
        queue.stop(ident)
    with pytest.raises(UserError, match="nothing to resume"):
        queue.resume(ident)
    queue.remove(ident)
    assert queue.entries() == []


def test_a_forged_entry_is_none(queue):
    queue.path.mkdir()
    (queue.path / "0123abcd.json").write_text('{"words": "train"}')
    (queue.path / "0123abce.json").write_text("[" * 100_000)
    assert queue.entries() == []
    runner(queue).step()
    assert ran(queue) == []


def test_the_paused_queue_starts_nothing(queue):
    put(queue, "a")
    queue.pause_all(True)
    own = runner(queue)
    own.step()
    assert ran(queue) == []
    queue.pause_all(False)
    until(own, lambda: ran(queue) == ["a"])


def test_the_queue_imports_no_torch():
    modules = "daguerre.queue.runner, daguerre.queue.keeper, daguerre.queue.check, daguerre.config.place"
    code = f"import sys, {modules}, daguerre.remote.actions; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.long  # two processes that import torch
def test_a_recipe_is_checked_before_it_is_queued(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.run(["queue", "add", "quickstart", "sampling.sampler=no", "queue=q"]) == errors.REFUSED
    assert "sampler" in capsys.readouterr().err
    assert main.run(["queue", "add", "quickstart", "run_name=a", "queue=q"]) == errors.DONE
    (listed,) = Queue(tmp_path / "q").entries()
    assert listed.entry.place == str(tmp_path / "runs" / "a")
    assert main.run(["queue", "list", "queue=q"]) == errors.DONE
    assert "waiting" in capsys.readouterr().out
