"""Worker processes: how one is started and ended, and what is said of one that died. What they do is
`data/loading/workers.py`'s and `data/loading/job_pool.py`'s affair.

A worker is a fresh interpreter, neither a fork (unsafe beside torch's threads) nor a second run of the caller's main
module, on its own end of a socket.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from daguerre.credentials import environment

_START = """
import signal, sys
for number in sys.argv[2].split(","):
    signal.signal(int(number), signal.SIG_IGN)
sys.path[:] = sys.argv[3:]
from daguerre import faults
from daguerre.data.loading.{module} import serve
faults.install()
serve(int(sys.argv[1]))
"""


@dataclass(frozen=True)
class Worker:
    """A process and our end of its socket."""

    process: subprocess.Popen[bytes]
    pipe: Connection

    def ended(self) -> str:
        """How the process ended, for a message; waits for it."""
        code = self.process.wait()
        return (
            f"was killed by signal {-code} (9 is often the system being out of memory)"
            if code < 0
            else f"exited {code}"
        )


@contextmanager
def started(module: str, first: object, number: int, ignored: Sequence[signal.Signals]) -> Iterator[list[Worker]]:
    """`number` processes that run `serve` of a module of `daguerre.data.loading` and were sent `first`, deaf to some signals.

    They are killed at the end of the block: what they hold is nothing to lose.
    """
    crew: list[Worker] = []
    try:
        for _ in range(number):
            crew.append(_started(module, ignored))
        for worker in crew:
            worker.pipe.send(first)
        yield crew
    finally:
        for worker in crew:
            worker.process.kill()
        for worker in crew:
            worker.process.wait()
            worker.pipe.close()


def _started(module: str, ignored: Sequence[signal.Signals]) -> Worker:
    ours, theirs = socket.socketpair()
    numbers = ",".join(str(int(one)) for one in ignored)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _START.format(module=module), str(theirs.fileno()), numbers, *sys.path],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **environment(), "OMP_NUM_THREADS": "1"},
            process_group=0,  # Ctrl-C goes to the parent alone: it saves, then ends its workers
        )
    return Worker(process, Connection(ours.detach()))
