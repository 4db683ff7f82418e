"""Worker processes: started, talked to and ended. Their work is in `workers.py` and `job_pool.py`.

A worker is a fresh interpreter, neither a fork (unsafe with torch's threads) nor a second run of the caller's main
module, on its own end of a socket. It ends when the socket does: with its parent, however that ended.
"""

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
from daguerre.errors import ProcessLost

_START = """
import signal, sys
for number in sys.argv[2].split(","):
    signal.signal(int(number), signal.SIG_IGN)
sys.path[:] = sys.argv[3:]
from daguerre import faults
from {module} import worker_main
faults.install()
worker_main(int(sys.argv[1]))
"""


@dataclass(frozen=True)
class Worker:
    """A process and our end of its socket."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    name: str = "worker process"
    without: str = ""
    """The setting that does without workers, for messages."""

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        """The socket. ProcessLost if the process has ended."""
        try:
            yield self.pipe
        except (EOFError, ConnectionError) as error:
            code = self.process.wait()
            how = f"was killed by signal {-code} (9 is often the system being out of memory)"
            raise ProcessLost(
                f"a {self.name} {how if code < 0 else f'exited {code}'}; see its error message above. {self.without} "
                "works without them"
            ) from error


@contextmanager
def started(
    module: str, first: object, count: int, ignored: Sequence[signal.Signals], name: str, without: str
) -> Iterator[list[Worker]]:
    """`count` processes that run `worker_main` of a module, are sent `first`, and ignore some signals.

    They are killed at the end of the block: they hold nothing that could be lost.
    """
    pool: list[Worker] = []
    try:
        for _ in range(count):
            pool.append(Worker(*_started(module, ignored), name, without))
        for worker in pool:
            worker.pipe.send(first)
        yield pool
    finally:
        for worker in pool:
            worker.process.kill()
        for worker in pool:
            worker.process.wait()
            worker.pipe.close()


def _started(module: str, ignored: Sequence[signal.Signals]) -> tuple[subprocess.Popen[bytes], Connection]:
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
    return process, Connection(ours.detach())
