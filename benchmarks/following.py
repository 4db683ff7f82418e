"""How much a process that follows a run slows its training, when it has a core of its own.

    python benchmarks/following.py [--pairs 10] [--steps 120] [--images 16] [--recipe quickstart] [key=value ...]

Each pair trains the same recipe twice, in turns which one is first: alone, and while `daguerre evaluate RUN follow=all`
measures the checker and FID (Inception with random weights) of every checkpoint. Training has the first core, the
follower the second. Printed: the wall-clock time of training's updates (their measured mean, saves left out) for
each pair, the median of the ratios, and its 95 % interval by the bootstrap. Needs a machine on which nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from daguerre.evaluation.formulas.bootstrap import interval


def started(core: int, *words: str) -> subprocess.Popen[bytes]:
    """A command of daguerre on one core."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "daguerre", *words],
        env=environment, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )  # fmt: skip


def trained(folder: Path, name: str, options: argparse.Namespace, reference: Path | None) -> tuple[float, int]:
    """Seconds of training's updates, and how many checkpoints were measured."""
    run = folder / name
    train = started(
        0, "train", options.recipe, f"output_dir={folder}", f"run_name={name}", f"duration={options.steps} steps",
        f"checkpoint.every={options.steps // 3} steps", "logging.every=10 steps", "lr_scheduler.warmup=10 steps",
        "validation.every=null", "data.checked_prompts=16", *options.settings,
    )  # fmt: skip
    follower = None
    if reference is not None:
        follower = started(
            1, "evaluate", str(run), "follow=all", "metrics=[shapes,fid]", "networks.inception=random",
            f"reference={reference}", f"num_images={options.images}", "every_seconds=1",
        )  # fmt: skip
    assert train.wait() == 0
    assert follower is None or follower.wait() == 0
    lines = [json.loads(line) for line in (run / "metrics" / "metrics.jsonl").read_text().splitlines()]
    means = [(line["step"], line["perf/step_time_seconds"]) for line in lines if "perf/step_time_seconds" in line]
    steps = np.diff([0, *(step for step, _ in means)])
    counted = zip(steps.tolist()[1:], means[1:], strict=True)  # the first interval starts everything
    return sum(count * mean for count, (_, mean) in counted), len(list(run.glob("evaluations/*/result.json")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory(prefix="daguerre-following-") as place:
        folder = Path(place)
        reference = folder / "reference.safetensors"
        words = ["reference", "quickstart", f"num_images={options.images}", "networks.inception=random"]
        assert started(1, *words, f"out={reference}").wait() == 0
        for pair in range(options.pairs):
            found: dict[bool, tuple[float, int]] = {}
            for followed in (False, True) if pair % 2 else (True, False):
                name = f"{'followed' if followed else 'alone'}-{pair}"
                found[followed] = trained(folder, name, options, reference if followed else None)
            ratios.append(found[True][0] / found[False][0])
            print(
                f"pair {pair + 1}: alone {found[False][0]:.2f} s, followed {found[True][0]:.2f} s "
                f"({found[True][1]} checkpoints measured), ratio {ratios[-1]:.4f}", flush=True,
            )  # fmt: skip
    low, high = interval(lambda rows: statistics.median(ratios[i] for i in rows), len(ratios), 2000)
    print(f"median ratio {statistics.median(ratios):.4f} ({low:.4f} to {high:.4f}), {len(ratios)} pairs")


if __name__ == "__main__":
    main()
