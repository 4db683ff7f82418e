"""A process with a watchdog and without torch, for test_watchdog.py.

python watched.py FOLDER RANK SIZE STUCK_SECONDS SILENT_SECONDS [DO AT_STEP]

Steps are 20 ms long and wait for nobody. DO is what this rank does at a step: hang, hold (its interpreter's lock),
fail, elsewhere (an error of which another rank tells), quit, collective (an error as gloo raises it), long (a phase
that may last); deaf: it ignores SIGTERM.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from daguerre.distributed.launch.environment import World
from daguerre.distributed.watchdog import heartbeat
from daguerre.distributed.watchdog.failure import Failure, Limits
from daguerre.distributed.watchdog.processes import myself
from daguerre.distributed.watchdog.watchdog import StacksFile, Watchdog
from daguerre.errors import ReportedElsewhere, UserError


def link(folder: Path, rank: int, size: int, limits: Limits) -> heartbeat.Heartbeat:
    """As distributed/process_group.py does it, over a file."""
    place = folder / "invitation.json"
    if rank == 0:
        listener = heartbeat.listen() if size > 1 else None
        invited = heartbeat.invitation(listener, ["127.0.0.1"]) if listener else {"word": ""}
        place.with_suffix(".new").write_text(json.dumps(invited))
        place.with_suffix(".new").rename(place)
        return heartbeat.HeartbeatServer(listener, invited["word"], myself(0), size, limits)
    while not place.exists():
        time.sleep(0.01)
    return heartbeat.HeartbeatClient(
        heartbeat.connect(json.loads(place.read_text()), myself(rank)), myself(rank), size, limits
    )


def act(what: str, watch: Watchdog, folder: Path) -> None:
    """What this rank was told to do."""
    if what == "hang":
        threading.Event().wait()
    if what == "hold":
        ctypes.PyDLL(None).sleep(1000)  # a call into a library that keeps the interpreter's lock
    if what == "fail":
        raise ZeroDivisionError("of its own")
    if what == "elsewhere":
        raise ReportedElsewhere(UserError("of all"))
    if what == "collective":
        time.sleep(0.1)
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:20511")
    if what == "long":
        with watch.doing("generating images"):
            while not (folder / "finish").exists():
                time.sleep(0.05)
    if what == "quit":
        sys.exit(138)


def main() -> None:
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    limits = Limits(float(sys.argv[4]), float(sys.argv[5]))
    what, at = (sys.argv[6], int(sys.argv[7])) if len(sys.argv) > 6 else ("", -1)
    launcher = "torchrun" if os.environ.get("LAUNCHED") else "none"
    if launcher != "none":
        signal.signal(signal.SIGTERM, signal.SIG_IGN if what == "deaf" else lambda *_: sys.exit(143))
    world = World(rank, rank, size, size, 1, 0, launcher)

    def on_end(failure: Failure) -> None:
        (folder / f"status-{rank}.json").write_text(json.dumps(vars(failure)))

    with Watchdog(world, link(folder, rank, size, limits), StacksFile(folder / "stacks", rank), on_end) as watch:
        for step in range(1, 10_000):
            time.sleep(0.02)
            if step == at:
                act(what, watch, folder)
            watch.step(step)
            if step == 1:
                (folder / f"pid-{rank}.new").write_text(str(os.getpid()))
                (folder / f"pid-{rank}.new").rename(folder / f"pid-{rank}")
            if (folder / "finish").exists():
                break


if __name__ == "__main__":
    main()
