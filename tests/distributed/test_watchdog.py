"""Processes that end, stand still or hang, and what becomes of the others. No torch here; test_start.py has gloo."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from daguerre.distributed.launch.environment import World
from daguerre.distributed.watchdog import heartbeat
from daguerre.distributed.watchdog.failure import Failure, Limits, Report, named, stuck
from daguerre.distributed.watchdog.heartbeat import Line
from daguerre.distributed.watchdog.processes import DUMP_SIGNAL, Peer, myself
from daguerre.distributed.watchdog.watchdog import Watchdog, may_come_from_others
from daguerre.errors import LOST, STUCK

WATCHED = Path(__file__).parent / "watched.py"


class Crew:
    """Processes of one run."""

    def __init__(self, folder: Path, size: int, stuck=60.0, silent=60.0, do: dict[int, tuple[str, int]] | None = None):
        self.folder, self.size = folder, size
        self.logs = [folder / f"log-{rank}" for rank in range(size)]
        self.processes = []
        for rank in range(size):
            words = [sys.executable, str(WATCHED), str(folder), str(rank), str(size), str(stuck), str(silent)]
            words += [str(word) for word in (do or {}).get(rank, ())]
            with self.logs[rank].open("w") as log:
                self.processes.append(subprocess.Popen(words, stderr=log))

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def under_way(self) -> None:
        deadline = time.monotonic() + 60
        while not all((self.folder / f"pid-{rank}").exists() for rank in range(self.size)):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def codes(self, but: int | None = None, seconds: float = 10.0) -> list[int]:
        """Exit codes, of all but one; all must be gone in time."""
        deadline = time.monotonic() + seconds
        return [
            process.wait(max(0.1, deadline - time.monotonic()))
            for rank, process in enumerate(self.processes)
            if rank != but
        ]

    def log(self, rank: int) -> str:
        return self.logs[rank].read_text()

    def status(self) -> tuple[str, dict]:
        (path,) = self.folder.glob("status-*.json")
        return path.name, json.loads(path.read_text())


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.long)])
def test_one_is_killed(tmp_path: Path, victim: int):
    with Crew(tmp_path, 4) as crew:
        crew.under_way()
        begun = time.monotonic()
        crew.processes[victim].kill()
        assert crew.codes(but=victim) == [LOST] * 3
        assert time.monotonic() - begun < 5
        for rank in set(range(4)) - {victim}:
            first = crew.log(rank).splitlines()[0]
            assert f"[rank {rank}] rank {victim} (" in first
            assert f"process {crew.processes[victim].pid}) is gone" in first
        name, status = crew.status()
        assert (name, status["ranks"]) == (f"status-{0 if victim else 1}.json", [victim])


@pytest.mark.long
@pytest.mark.long
def test_two_are_killed_together(tmp_path: Path):
    with Crew(tmp_path, 4) as crew:
        crew.under_way()
        crew.processes[1].kill()
        crew.processes[3].kill()
        assert crew.codes() == [LOST, -9, LOST, -9]
        assert "ranks 1, 3 (" in crew.log(0)


def test_one_is_stopped(tmp_path: Path):
    """Its stacks are written when it is woken to be ended; nobody stays."""
    with Crew(tmp_path, 3, silent=1.5) as crew:
        crew.under_way()
        crew.processes[1].send_signal(signal.SIGSTOP)
        codes = crew.codes(seconds=14)
        assert (codes[0], codes[2]) == (LOST, LOST)
        assert codes[1] in (LOST, -9)
        assert "did not respond for 1.5 s (silent_seconds): rank 1 stopped by a signal" in crew.log(0)
        stacks = sorted((tmp_path / "stacks").glob("*"))
        assert [path.name for path in stacks] == [f"rank-0000{rank}.txt" for rank in range(3)]
        assert all("most recent call first" in path.read_text() for path in stacks)


@pytest.mark.long
def test_rank_0_is_stopped(tmp_path: Path):
    with Crew(tmp_path, 3, silent=2) as crew:
        crew.under_way()
        crew.processes[0].send_signal(signal.SIGSTOP)
        codes = crew.codes(seconds=14)
        assert codes[1:] == [LOST, LOST]
        assert codes[0] in (LOST, -9)
        assert "rank 0 stopped by a signal (SIGSTOP)" in crew.log(1)
        assert crew.status()[0] == "status-1.json"


def test_all_hang_and_one_is_named(tmp_path: Path):
    """The main threads of the others stand behind it: it is a step behind."""
    do = {0: ("hang", 21), 1: ("hang", 20), 2: ("hang", 21)}
    with Crew(tmp_path, 3, stuck=1.5, do=do) as crew:
        assert crew.codes(seconds=20) == [STUCK] * 3
        first, *more = crew.log(0).splitlines()
        assert "[rank 0] stuck: no rank made a step for " in first
        assert "s (stuck_seconds): rank 1 (" in first
        assert "ranks 0, 2: step 20, training, in wait (threading.py:" in more[0]
        assert "rank 1: step 19, training" in more[1]
        assert crew.status()[1]["kind"] == "stuck"
        assert "in act" in (tmp_path / "stacks" / "rank-00001.txt").read_text()


@pytest.mark.long
def test_one_holds_its_interpreters_lock(tmp_path: Path):
    """Its own watchdog cannot run: another one's signal writes its stacks, and ends it."""
    with Crew(tmp_path, 2, silent=2, do={1: ("hold", 20)}) as crew:
        codes = crew.codes(seconds=20)
        assert codes[0] == LOST
        assert codes[1] in (LOST, -9)
        assert "rank 1 (" in crew.log(0)
        assert "in act" in (tmp_path / "stacks" / "rank-00001.txt").read_text()


@pytest.mark.long
def test_a_phase_that_may_last(tmp_path: Path):
    with Crew(tmp_path, 2, stuck=0.5, do={0: ("long", 20), 1: ("hang", 20)}) as crew:
        crew.under_way()
        time.sleep(1.5)
        assert [process.poll() for process in crew.processes] == [None, None]
        (tmp_path / "finish").touch()
        assert crew.processes[0].wait(10) == 0
    assert crew.log(0) == ""


def test_one_fails_of_itself(tmp_path: Path):
    """Its own error and exit code stand; the others name it."""
    with Crew(tmp_path, 3, do={1: ("fail", 20)}) as crew:
        assert crew.codes() == [LOST, 1, LOST]
        assert crew.log(1).count("Traceback") == 1
        assert "failed: ZeroDivisionError: of its own" in crew.log(2).splitlines()[0]


def test_an_error_of_all_is_told_by_one(tmp_path: Path):
    """Ranks that leave it to another to tell are no failure: that one speaks, however late it is."""
    with Crew(tmp_path, 3, do={0: ("fail", 120), 1: ("elsewhere", 20), 2: ("elsewhere", 20)}) as crew:
        assert crew.codes(seconds=30) == [1, 1, 1]
        assert "failed:" not in crew.log(0)
        assert crew.log(0).count("ZeroDivisionError: of its own") == 1


def test_an_error_that_comes_from_anothers_end_waits_for_the_cause(tmp_path: Path):
    with Crew(tmp_path, 3, do={1: ("collective", 60), 2: ("collective", 60)}) as crew:
        crew.under_way()
        crew.processes[0].kill()
        assert crew.codes() == [-9, LOST, LOST]
        for rank in (1, 2):
            assert "rank 0 (" in crew.log(rank).splitlines()[0]
            assert "Traceback" not in crew.log(rank)


@pytest.mark.long
def test_an_orderly_end_is_no_loss(tmp_path: Path):
    """Rank 0 leaves first; the others go on, and end as they like."""
    with Crew(tmp_path, 3, silent=1, do={0: ("quit", 20)}) as crew:
        assert crew.processes[0].wait(20) == 138
        time.sleep(1.5)
        assert crew.processes[1].poll() is None
        (tmp_path / "finish").touch()
        assert crew.codes() == [138, 0, 0]
        assert not list((tmp_path / "stacks").glob("*"))


@pytest.mark.parametrize("do", [None, pytest.param({0: ("deaf", -1), 1: ("deaf", -1)}, marks=pytest.mark.long)])
def test_workers_die_with_their_launcher(tmp_path: Path, do):
    """As by SIGTERM where they listen; by force where they do not."""
    start = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from test_watchdog import Crew; "
        f"crew = Crew(Path(sys.argv[2]), 2, stuck=1.5, do={do!r}); [p.wait() for p in crew.processes]"
    )
    words = [sys.executable, "-c", start, str(WATCHED.parent), str(tmp_path)]
    agent = subprocess.Popen(words, env={**os.environ, "LAUNCHED": "1"})
    crew = Crew.__new__(Crew)
    crew.folder, crew.size = tmp_path, 2
    try:
        crew.under_way()
        workers = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
    finally:
        agent.kill()
        agent.wait()
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert f"torchrun (process {agent.pid}) has exited: stopping" in (tmp_path / "log-1").read_text()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_stranger_is_shown_out():
    listener = heartbeat.listen()
    watch = heartbeat.HeartbeatServer(listener, "word", myself(0), 2, Limits(60, 60))
    report = Report(0, 0, "starting", None, "here", False)
    for words in (b"GET / HTTP/1.1\r\n\r\n", b'{"word": "guess", "peer": {}}\n', b"[]\n"):
        with socket.create_connection(listener.getsockname()[:2]) as stranger:
            stranger.sendall(words)
            for _ in range(3):
                assert watch.turn(report, 0.05) is None
            assert stranger.recv(100) == b""
    watch.leave("")


def test_documents_come_whole():
    one, other = (Line(end) for end in socket.socketpair())
    for number in range(500):
        one.send({"number": number, "text": "x" * 900})
    found = []
    while len(found) < 500:
        found += other.receive()
        one.flush()
    assert [document["number"] for document in found] == list(range(500))
    one.close()
    assert (other.receive(), other.open) == ([], False)
    other.close()


def test_who_is_at_fault():
    waiting = Report(9, 9, "training", 0, "finish (distributed/collectives.py:70)", True)
    reading = Report(8, 9, "training", 0, "next (data/loading/loader.py:9)", False)
    behind = Report(8, 8, "training", 0, "finish (distributed/collectives.py:70)", True)
    peers = {rank: Peer(rank, 7, 8, "", f"n{rank}") for rank in range(4)}
    assert stuck(peers, {0: waiting, 1: waiting, 2: reading}, set(), 3, 5).ranks == (2,)
    assert stuck(peers, {0: waiting, 1: behind, 2: waiting}, set(), 3, 5).ranks == (1,)
    assert stuck(peers, {0: waiting, 1: waiting, 2: reading}, {1}, 3, 5).ranks == (1,)
    nobody = stuck(peers, {0: waiting, 1: waiting}, set(), 2, 5)
    assert nobody.ranks == ()
    assert nobody.text.startswith(
        "stuck: no rank made a step for 5 s (stuck_seconds): which rank is not known\n  ranks 0-1: step 9"
    )
    assert nobody.writer == 0
    assert Failure("gone", (0, 1), "", 4).writer == 2


def test_names_of_ranks():
    assert [named([3]), named([0, 1, 2, 5]), named([4, 2])] == ["rank 3", "ranks 0-2, 5", "ranks 2, 4"]


def test_errors_of_other_ranks_making():
    assert may_come_from_others(RuntimeError("NCCL communicator was aborted"))
    wrapped = ValueError("cannot save")
    wrapped.__cause__ = RuntimeError("Connection closed by peer")
    assert may_come_from_others(wrapped)
    assert not may_come_from_others(ValueError("connection"))
    assert not may_come_from_others(RuntimeError("CUDA out of memory"))


def test_a_peer_is_its_process_and_no_other():
    child = subprocess.Popen(["sleep", "60"])
    me = myself(0)
    peer = Peer(1, child.pid, int(Path(f"/proc/{child.pid}/stat").read_text().split()[21]), me.home, me.host)
    other = Peer(1, child.pid, peer.born + 1, me.home, me.host)
    elsewhere = Peer(1, child.pid, peer.born, "another machine", me.host)
    for stranger in (other, elsewhere):
        stranger.send(DUMP_SIGNAL)
        assert stranger.state == ""
    assert peer.state in ("S", "R", "D")
    peer.send(signal.SIGKILL)
    assert child.wait() == -9
    assert peer.state == ""


def test_a_slow_step_is_not_stuck():
    """What steps have taken so far is the measure, on machines where they take minutes."""
    own = heartbeat.HeartbeatServer(None, "", myself(0), 1, Limits(60, 60))
    watch = Watchdog(World(), own, None, print)
    assert watch.report().allowed_seconds is None
    watch.step(1)
    time.sleep(0.05)
    watch.step(2)
    assert 0.5 <= (watch.report().allowed_seconds or 0) < 5
    with watch.doing("saving", 3):
        assert (watch.report().doing, watch.report().allowed_seconds) == ("saving", 3)
        time.sleep(0.5)
    watch.step(3)
    assert 0.5 <= (watch.report().allowed_seconds or 0) < 5
    assert own.turn(watch.report(), 0.01) is None
    own.leave("")


def test_a_run_that_was_stopped_and_goes_on_is_not_stuck(monkeypatch):
    """Ctrl-Z, then `fg` after ten minutes: the signal meets the watchdog in its wait."""
    now = [time.monotonic()]
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def waits(seconds, stopped=0.0):
        now[0] += seconds + stopped

    own = heartbeat.HeartbeatServer(None, "", myself(0), 1, Limits(60, 60))
    report = Report(5, 5, "training", 1.0, "backward (passes.py:43)", False)
    own._selector = SimpleNamespace(select=waits)
    assert own.turn(report, 0.2) is None
    own._selector = SimpleNamespace(select=lambda seconds: waits(seconds, stopped=600))
    assert own.turn(report, 0.2) is None
    own._selector = SimpleNamespace(select=waits)
    seen = [own.turn(report, 0.2) for _ in range(400)]
    assert not any(seen[:290])
    assert isinstance(seen[-1], Failure), "it is, where it gets no further after that"
