"""A process of a group over gloo that "trains", for test_start.py.

python group.py FOLDER [DO RANK STEP]

What the launcher says is in the environment; without an address they meet over a file. Every step sums a number over
all ranks and asks whether any was told to stop; a stop is "saved" (a file) and then all leave. DO: hang, fail, late.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from daguerre.distributed.launch.environment import read
from daguerre.distributed.process_group import Processes, Watching, start
from daguerre.distributed.settings import DistributedSettings
from daguerre.distributed.watchdog.failure import Failure
from daguerre.errors import UserError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def train(here: Processes, folder: Path, told: list[int], do: tuple[str, int, int]) -> int:
    what, rank, at = do
    own = here.world.rank
    assert here.agreement.gather({"rank": own, "text": "x" * own}) == [
        {"rank": r, "text": "x" * r} for r in range(here.world.size)
    ]
    assert here.agreement.share({"a": [1, 2]} if own == 0 else None) == {"a": [1, 2]}
    seconds = []
    for step in range(1, 100_000):
        if own == rank and step == at:
            if what == "hang":
                threading.Event().wait()
            if what == "fail":
                raise UserError("of its own")
        number = torch.ones(1)
        if here.world.size > 1:
            dist.all_reduce(number)
        assert number == here.world.size
        here.watch.step(step)
        begun = time.perf_counter()
        signalled = here.agreement.signalled(signal.Signals(told[0]) if told else None)
        seconds.append(time.perf_counter() - begun)
        if step == 5:
            (folder / f"new-{own}").write_text(str(os.getpid()))
            (folder / f"new-{own}").rename(folder / f"pid-{own}")
        if signalled:
            document = {"step": step, "signal": signalled, "median": sorted(seconds)[len(seconds) // 2]}
            (folder / f"saved-{own}.json").write_text(json.dumps(document))
            return 128 + signalled
        time.sleep(0.005)
    return 0


def main() -> int:
    folder = Path(sys.argv[1])
    do = (sys.argv[2], int(sys.argv[3]), int(sys.argv[4])) if len(sys.argv) > 2 else ("", -1, -1)
    told: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda got, frame: told.append(got))
    world = read()
    meet = "env://" if world.address else f"file://{folder}/rendezvous"
    settings = DistributedSettings(
        dist_url=meet, stuck_seconds=float(os.environ.get("STUCK", "60")), silent_seconds=60,
        rendezvous_seconds=float(os.environ.get("PATIENCE", "120")),
    )  # fmt: skip
    (folder / f"started-{world.rank}").write_text(str(os.getpid()))
    if do[0] == "late" and do[1] == world.rank:
        time.sleep(1000)

    def on_end(failure: Failure) -> None:
        (folder / f"status-{world.rank}.json").write_text(json.dumps(vars(failure)))

    watching = Watching(folder / "stacks", on_end, lambda: 128 + told[0] if told else 0)
    try:
        with start(world, settings, "cpu", watching) as here:
            return train(here, folder, told, do)
    except UserError as error:  # as cli/main.py does
        print(f"daguerre: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
