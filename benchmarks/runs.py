r"""Updates of whole runs of one recipe under several settings, in turns: what trackers cost, what a cache saves.

    python benchmarks/runs.py --variants "{NAME: [key=value, ...], ...}" [--rounds 5] [--steps 120] \
        [--recipe quickstart] [key=value ...]
    python benchmarks/runs.py --variants "{none: ['logging.trackers=[]'], wandb: ['logging.trackers={wandb: {mode:
        offline}}'], tensorboard: ['logging.trackers=[tensorboard]']}" "logging.every=1 step"
    python benchmarks/runs.py --variants "{without: [], cached: [cache.path=FOLDER]}" --recipe RECIPE data.path=IMAGES

Each round trains each variant once, in an order that turns around, in a process of its own. Printed: the time of the
updates (their measured mean; the first interval, which starts everything, and saves are left out), and for each variant
but the first the median over rounds of its ratio to the first, with its 95 % interval by the bootstrap. Needs a machine
on which nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml


def started(*words: str, core: int | None = None) -> subprocess.Popen[bytes]:
    """A command of daguerre with one thread, on one core if that is given."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    kept = None if core is None else (lambda: os.sched_setaffinity(0, {core}))
    return subprocess.Popen(
        [sys.executable, "-m", "daguerre", *words], env=environment, stdout=subprocess.DEVNULL, preexec_fn=kept
    )


def training(recipe: str, run: Path, steps: int, *more: str, core: int | None = None) -> subprocess.Popen[bytes]:
    """A run of some updates."""
    return started(
        "train", recipe, f"output_dir={run.parent}", f"run_name={run.name}", f"duration={steps} steps",
        "lr_scheduler.warmup=10 steps", "validation.every=null", *more, core=core,
    )  # fmt: skip


def step_times(run: Path) -> dict[int, float]:
    """Mean seconds of an update before a step, by that step."""
    lines = [json.loads(line) for line in (run / "metrics" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["perf/step_time_seconds"] for line in lines if "perf/step_time_seconds" in line}


def seconds_of_updates(run: Path) -> float:
    """Of all updates after the first line of metrics, by their measured means."""
    times = step_times(run)
    return float(sum(count * mean for count, mean in zip(np.diff([*times]), [*times.values()][1:], strict=True)))


def told(name: str, ratios: Sequence[float]) -> str:
    """The median of the ratios, with its interval: that of medians of as many ratios, drawn with replacement."""
    drawn = np.random.default_rng(0).choice(np.array(ratios), (2000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return f"{name}: median ratio {statistics.median(ratios):.4f} ({low:.4f} to {high:.4f}) of {len(ratios)} rounds"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=yaml.safe_load, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    names = list(options.variants)
    ratios: dict[str, list[float]] = {name: [] for name in names[1:]}
    with tempfile.TemporaryDirectory(prefix="daguerre-runs-") as place:
        for number in range(options.rounds):
            found: dict[str, float] = {}
            for name in names[:: -1 if number % 2 else 1]:
                run = Path(place) / f"{name}-{number}"
                more = ["checkpoint.export=false", "sampling.num_images=0", *options.settings, *options.variants[name]]
                assert training(options.recipe, run, options.steps, *more).wait() == 0
                found[name] = seconds_of_updates(run)
            for name in ratios:
                ratios[name].append(found[name] / found[names[0]])
            print(f"round {number + 1}: {', '.join(f'{name} {found[name]:.2f} s' for name in names)}", flush=True)
    for name, each in ratios.items():
        print(told(f"{name} to {names[0]}", each))


if __name__ == "__main__":
    main()
