"""Several processes of one program on this machine, as one: signals go to all of them, and their exit codes become one.

The environment tells each which one it is, as torchrun would (distributed/launch/environment.py); no torch here.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from daguerre import system
from daguerre.errors import LOST

_HANDED_ON = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,
}
"""A closed terminal stops a run as SIGTERM does."""
_PATIENCE_SECONDS = 60.0
"""Time for the others to end by themselves when one has failed; as long again until they are killed."""
_POLL_SECONDS = 0.05


def run(command: Sequence[str], count: int, patience_seconds: float = _PATIENCE_SECONDS) -> int:
    """Runs `count` processes of a command until all have ended; their exit code."""
    environ, processes = environment(count), list[subprocess.Popen[bytes]]()
    with _received() as signals:
        try:
            for rank in range(count):
                own = environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                # A session of its own: Ctrl-C comes once, from here.
                processes.append(subprocess.Popen(command, env=own, start_new_session=True))
            ended_alone = _wait(processes, signals, patience_seconds)
        finally:
            _send(processes, signal.SIGKILL)
    return together([process.wait() for process in ended_alone])


def environment(count: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables for all processes: how many they are, and where on this machine they meet."""
    kept = {name: value for name, value in environ.items() if not name.startswith("TORCHELASTIC_")}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = max(1, system.cores() // count)
    variables = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0, "MASTER_PORT": port}
    return {"OMP_NUM_THREADS": str(threads), **kept, "MASTER_ADDR": "127.0.0.1"} | {
        name: str(value) for name, value in variables.items()
    }


def together(codes: Sequence[int]) -> int:
    """One exit code: of the processes that failed of themselves, the highest; a signal's is 128 and its number."""
    as_shell = {128 - code if code < 0 else code for code in codes}
    of_themselves = as_shell - {0, LOST}
    return max(of_themselves or as_shell)


@contextmanager
def _received() -> Iterator[list[signal.Signals]]:
    """Within the context the signals that came to this process, as the others are to get them."""
    found: list[signal.Signals] = []

    def remember(number: int, frame: FrameType | None) -> None:
        found.append(_HANDED_ON[signal.Signals(number)])

    before = {number: signal.signal(number, remember) for number in _HANDED_ON}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], signals: list[signal.Signals], patience_seconds: float
) -> list[subprocess.Popen[bytes]]:
    """Waits for all, and hands on signals as they come; those that were not ended from here."""
    failed_at: float | None = None
    ended: list[subprocess.Popen[bytes]] = []
    while running := [process for process in processes if process.poll() is None]:
        while signals:
            _send(running, signals.pop(0))
        if failed_at is None and any(process.returncode for process in processes):
            failed_at = time.monotonic()
        late = 0.0 if failed_at is None else time.monotonic() - failed_at
        if late > patience_seconds and not ended:
            ended = running
            _send(running, signal.SIGTERM)
        elif late > 2 * patience_seconds:
            _send(running, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return [process for process in processes if process not in ended]


def _send(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)
