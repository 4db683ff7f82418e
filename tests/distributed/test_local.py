"""Several processes of a program on this machine: what each is told, signals, and the exit code of all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from daguerre.distributed.launch import environment, local


def program(folder: Path, text: str) -> list[str]:
    path = folder / "program.py"
    path.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(text))
    return [sys.executable, str(path)]


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_is_told_which_one_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = local.environment(3) | {"RANK": "2", "LOCAL_RANK": "2"}
    own = environment.read(found)
    assert (own.rank, own.local_rank, own.size, own.local_size, own.nodes) == (2, 2, 3, 3, 1)
    assert own.address == "127.0.0.1"
    assert own.port
    assert "TORCHELASTIC_USE_AGENT_STORE" not in found
    assert found["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
    assert local.environment(3, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert local.run(program(tmp_path, f"open(r'{tmp_path}/rank-%d' % rank, 'w')"), 3) == 0
    assert {path.name for path in tmp_path.glob("rank-*")} == {"rank-0", "rank-1", "rank-2"}


@pytest.mark.parametrize(
    ("codes", "one"),
    [([0, 0], 0), ([2, 2], 2), ([4, 1, 4], 1), ([4, -9], 137), ([143, 143], 143), ([138, 130], 138), ([4, 4], 4)],
)
def test_exit_codes_become_one(codes: list[int], one: int):
    assert local.together(codes) == one


def test_the_code_of_the_one_that_failed_passes_through_and_nobody_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The others hang, and do not listen to SIGTERM either."""
    hangs = """
        while rank == 1:
            if os.path.exists(os.environ["MARK"]):
                sys.exit(3)
            time.sleep(0.02)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(os.environ["MARK"], "w").write(str(os.getpid()))
        time.sleep(600)
    """
    mark = tmp_path / "mark"
    monkeypatch.setenv("MARK", str(mark))
    assert local.run(program(tmp_path, hangs), 2, patience_seconds=1.5) == 3
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


@pytest.mark.parametrize(
    ("sent", "heard"),
    [(signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "SIGUSR1"), (signal.SIGINT, "SIGINT"), (signal.SIGHUP, "SIGTERM")],
)
def test_a_signal_reaches_every_process(tmp_path: Path, sent: signal.Signals, heard: str):
    listens = f"""
        def leave(number, frame):
            open(r"{tmp_path}/heard-%d" % rank, "w").write(signal.Signals(number).name)
            sys.exit(128 + number)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, leave)
        open(r"{tmp_path}/here-%d" % rank, "w")
        time.sleep(600)
    """
    run = f"local.run({program(tmp_path, listens)!r}, 2)"
    code = f"import sys; from daguerre.distributed.launch import local; sys.exit({run})"
    launcher = subprocess.Popen([sys.executable, "-c", code])
    wait_for(tmp_path / "here-0", tmp_path / "here-1")
    launcher.send_signal(sent)
    assert launcher.wait(60) == 128 + signal.Signals[heard]
    assert [(tmp_path / f"heard-{rank}").read_text() for rank in range(2)] == [heard] * 2
