"""How much a process that follows a run slows its training, when it has a core of its own.

    python benchmarks/following.py [--pairs 10] [--steps 120] [--images 16] [--recipe quickstart] [key=value ...]

Each pair trains the same recipe twice, in turns which one is first: alone, and while `daguerre evaluate RUN follow=all`
measures the checker and FID (Inception with random weights) of every checkpoint. Training has the first core, the
follower the second. Printed: for each pair the wall-clock time of training's updates (their measured mean, saves left
out) and the processor time of the whole training process, the medians of the ratios, and their 95 % intervals by the
bootstrap. Wall-clock times need a machine on which nothing else runs; processor times bear some load, and tell what
training does more because it is followed, not what it waits for.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from runs import seconds_of_updates, started, told, training


class Trained(NamedTuple):
    """One run."""

    updates_s: float
    """Wall-clock time."""
    processor_s: float
    measured: int
    """Checkpoints."""


def trained(folder: Path, name: str, options: argparse.Namespace, reference: Path | None) -> Trained:
    """Trains once, followed if there is a reference."""
    run = folder / name
    often = [f"checkpoint.every={options.steps // 3} steps", "logging.every=10 steps", "data.checked_prompts=16"]
    train = training(options.recipe, run, options.steps, *often, *options.settings, core=0)
    follower = None
    if reference is not None:
        follower = started(
            "evaluate", str(run), "follow=all", "metrics=[shapes,fid]", "networks.inception=random",
            f"reference={reference}", f"num_images={options.images}", "every_seconds=1", core=1,
        )  # fmt: skip
    _, status, used = os.wait4(train.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert follower is None or follower.wait() == 0
    processor_s = used.ru_utime + used.ru_stime
    return Trained(seconds_of_updates(run), processor_s, len(list(run.glob("evaluations/*/result.json"))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {"wall-clock time of updates": [], "processor time": []}
    with tempfile.TemporaryDirectory(prefix="daguerre-following-") as place:
        folder = Path(place)
        reference = folder / "reference.safetensors"
        words = ["reference", "quickstart", f"num_images={options.images}", "networks.inception=random"]
        assert started(*words, f"out={reference}", core=1).wait() == 0
        for pair in range(options.pairs):
            found: dict[bool, Trained] = {}
            for followed in (False, True) if pair % 2 else (True, False):
                name = f"{'followed' if followed else 'alone'}-{pair}"
                found[followed] = trained(folder, name, options, reference if followed else None)
            alone, followed = found[False], found[True]
            for each, own in zip(ratios.values(), range(2), strict=True):
                each.append(followed[own] / alone[own])
            print(
                f"pair {pair + 1}: alone {alone.updates_s:.2f} s ({alone.processor_s:.2f} s of a processor), followed "
                f"{followed.updates_s:.2f} s ({followed.processor_s:.2f} s), {followed.measured} checkpoints measured",
                flush=True,
            )
    for name, each in ratios.items():
        print(told(f"followed to alone, {name}", each))


if __name__ == "__main__":
    main()
