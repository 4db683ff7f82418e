"""How much a process that follows a run slows its training, when it has a core of its own.

    python benchmarks/following.py [--rounds 70] [--steps 3] [--images 64] [--recipe quickstart] [key=value ...]

One run trains on the first core. On the second `daguerre evaluate RUN follow=all` measures the checker and FID
(Inception with random weights) of its checkpoints, and another `daguerre evaluate` does the same for a run that has
ended. Both are stopped (SIGSTOP) and go on (SIGCONT) by turns, so that each round has as many updates of training
alone, followed, and beside a process that has nothing to do with it, in an order that turns from round to round. What
slows training in both is the machine (shared caches, memory), what slows it in `followed` alone is that it is followed.
Turns are short, as other guests of a host slow a virtual machine for tens of seconds.

Printed: for each round the mean time of an update in each, the medians of their ratios, and 95 % intervals by the
bootstrap. Saves are left out, and the first third of each turn, in which the processes change.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from runs import started, step_times, told, training

TURNS = ("alone", "followed", "beside another")
WARM = 72
"""Updates before the first turn, in which everything starts, and between saves, about."""


def last_step(run: Path) -> int:
    """Step of the newest line of metrics."""
    file = run / "metrics" / "metrics.jsonl"
    if not file.exists():
        return 0
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - 4096))
        whole = lines.read().splitlines()[1:]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def evaluation(run: Path, reference: Path, images: int, *more: str) -> subprocess.Popen[bytes]:
    """A measurement on the second core."""
    return started(
        "evaluate", str(run), "metrics=[shapes,fid]", "networks.inception=random", f"reference={reference}",
        f"num_images={images}", *more, core=1,
    )  # fmt: skip


def only(works: subprocess.Popen[bytes] | None, *processes: subprocess.Popen[bytes]) -> None:
    """Stops all processes but one."""
    for process in processes:
        assert process.poll() is None, "a measurement has ended: give it more --images"
        process.send_signal(signal.SIGCONT if process is works else signal.SIGSTOP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=70)
    parser.add_argument("--steps", type=int, default=3, help="of a turn, a multiple of 3")
    parser.add_argument(
        "--images", type=int, default=64, help="of each checkpoint: enough that none waits for the next"
    )
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    third, a_round = options.steps // 3, len(TURNS) * options.steps
    often = [f"logging.every={third} steps", "data.checked_prompts=4", *options.settings]
    warm = a_round * math.ceil(WARM / a_round)
    os.sched_setaffinity(0, {1})
    with tempfile.TemporaryDirectory(prefix="daguerre-following-") as place:
        run, ended, reference = Path(place) / "run", Path(place) / "ended", Path(place) / "reference.safetensors"
        assert training(options.recipe, ended, 20, *often).wait() == 0
        words = ["reference", options.recipe, f"num_images={options.images}", "networks.inception=random"]
        assert started(*words, f"out={reference}").wait() == 0
        saves = f"checkpoint.every={warm} steps"
        train = training(options.recipe, run, warm + options.rounds * a_round, saves, *often, core=0)
        follower = evaluation(run, reference, options.images, "follow=all", "every_seconds=1")
        other = evaluation(ended, reference, 1000 * options.images)
        turns = [TURNS[(turn + number) % 3] for number in range(options.rounds) for turn in range(3)]
        try:
            for turn, name in enumerate(turns):
                while last_step(run) < warm + turn * options.steps:
                    assert train.poll() is None
                    time.sleep(0.02)
                only({"alone": None, "followed": follower, "beside another": other}[name], follower, other)
            assert train.wait() == 0
        finally:
            for process in (train, follower, other):
                process.kill()
                process.wait()
        times = step_times(run)
    found: dict[str, list[float]] = {name: [] for name in TURNS}
    for turn, name in enumerate(turns):
        ends = warm + (turn + 1) * options.steps
        found[name].append(statistics.mean([times[ends - third], times[ends]]))
    for number, row in enumerate(zip(*found.values(), strict=True), 1):
        print(f"round {number}: " + ", ".join(f"{name} {1e3 * ms:.1f} ms" for name, ms in zip(TURNS, row, strict=True)))
    for name, other_name in (("followed", "alone"), ("beside another", "alone"), ("followed", "beside another")):
        ratios = [own / others for own, others in zip(found[name], found[other_name], strict=True)]
        print(told(f"{name} to {other_name}", ratios))


if __name__ == "__main__":
    main()
