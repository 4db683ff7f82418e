"""Processes of a run as the system knows them: who they are, whether they live, and how they are ended.

A process can look at and end those of its own node only; a process id counts together with its start time and with the
machine and the namespace that it belongs to.
"""

import os
import signal
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from daguerre import system

DUMP_SIGNAL = signal.SIGRTMIN + 9
"""Makes a process write its stacks, whatever its interpreter does (`StacksFile`)."""


@dataclass(frozen=True)
class Peer:
    """A process of the run."""

    rank: int
    pid: int
    born: int
    """Start time, in the system's ticks."""
    home: str
    """The machine since it was started, and the namespace of its process ids."""
    host: str
    """The machine's name, for people."""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    @property
    def state(self) -> str:
        """The system's letter for what it does (`T` is stopped); empty once it has ended, or where it is out of
        sight."""
        found = system.process(self.pid) if self.home == _home() else None
        if found is None or int(found.started) != self.born or found.state in system.ENDED:
            return ""
        return found.state

    def send(self, number: int) -> None:
        """Sends a signal, if it lives on this node."""
        if self.state:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def myself(rank: int) -> Peer:
    own = system.process(os.getpid())
    assert own is not None
    return Peer(rank, os.getpid(), int(own.started), _home(), socket.gethostname())


def end(peers: Collection[Peer], seconds: float, stacks: bool) -> None:
    """Waits for processes of this node to end, and kills those that do not; with `stacks` those are made to write where
    they stand first."""
    begun, asked = time.monotonic(), False
    while (waited := time.monotonic() - begun) < seconds and any(peer.state for peer in peers):
        for peer in peers if stacks and not asked else ():
            # One that was stopped cannot answer anything else; one that hangs may still answer by itself.
            if peer.state == "T" or waited > seconds / 2:
                peer.send(DUMP_SIGNAL)
                peer.send(signal.SIGCONT)
                asked = asked or waited > seconds / 2
        time.sleep(0.05)
    for peer in peers:
        peer.send(signal.SIGKILL)


def _home() -> str:
    return f"{system.boot()}/{os.stat('/proc/self/ns/pid').st_ino}"
