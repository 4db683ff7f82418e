"""Signals become a question; the second Ctrl-C is Python's own; forked workers do not inherit it."""

import os
import signal
import subprocess
import sys

import pytest

from daguerre.checkpoint.signals import StopSignals

LOOP = """
import sys, time
from daguerre.checkpoint.signals import StopSignals
with StopSignals() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("saving", stop.signal.name, flush=True)
    if "slow" in sys.argv:
        time.sleep(30)
sys.exit(stop.exit_code)
"""


def run(*signals, slow=False):
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, *(["slow"] if slow else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = [process.stdout.readline()]
    for number in signals:
        process.send_signal(number)
        if len(lines) == 1:
            lines.append(process.stdout.readline())
    _, errors = process.communicate(timeout=20)
    return process.returncode, lines[1].strip(), errors


def test_sigterm_saves_and_exits_143():
    assert run(signal.SIGTERM) == (143, "saving SIGTERM", "")


def test_sigint_saves_and_exits_130():
    assert run(signal.SIGINT) == (130, "saving SIGINT", "")


def test_sigusr1_saves_and_exits_138():
    assert run(signal.SIGUSR1) == (138, "saving SIGUSR1", "")


def test_a_second_sigint_interrupts():
    code, line, errors = run(signal.SIGINT, signal.SIGINT, slow=True)
    assert line == "saving SIGINT"
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in errors


def test_a_launcher_hands_on_what_the_terminal_sent_already():
    with StopSignals(launched=True) as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.exit_code == 130


def test_the_first_signal_counts_and_what_was_there_comes_back():
    ours = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in ours]
    with StopSignals() as stop:
        assert not stop.requested
        assert stop.exit_code == 0
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal is signal.SIGTERM
        assert stop.exit_code == 143
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in ours] == before


FORKED = """
import os, signal, time
from daguerre.checkpoint.signals import StopSignals
with StopSignals() as stop:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGUSR1)
        print("still here", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        print("never", flush=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print(os.WTERMSIG(status), stop.requested)
"""


def test_forked_children_ignore_sigint_and_sigusr1_and_die_of_sigterm():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    assert done.stdout == "still here\n15 False\n"
