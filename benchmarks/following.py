"""How much a process that follows a run slows its training, when it has a core of its own.

    python benchmarks/following.py [--pairs 10] [--steps 120] [--images 16] [--recipe quickstart] [key=value ...]

Each pair trains the same recipe twice, in turns which one is first: alone, and while `daguerre evaluate RUN follow=all`
measures the checker and FID (Inception with random weights) of every checkpoint. Training has the first core, the
follower the second. Printed: the wall-clock time of training's updates (their measured mean, saves left out) for
each pair, the median of the ratios, and its 95 % interval by the bootstrap. Needs a machine on which nothing else runs.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from runs import seconds_of_updates, started, told, training


def trained(folder: Path, name: str, options: argparse.Namespace, reference: Path | None) -> tuple[float, int]:
    """Seconds of training's updates, and how many checkpoints were measured."""
    run = folder / name
    often = [f"checkpoint.every={options.steps // 3} steps", "logging.every=10 steps", "data.checked_prompts=16"]
    train = training(options.recipe, run, options.steps, *often, *options.settings, core=0)
    follower = None
    if reference is not None:
        follower = started(
            "evaluate", str(run), "follow=all", "metrics=[shapes,fid]", "networks.inception=random",
            f"reference={reference}", f"num_images={options.images}", "every_seconds=1", core=1,
        )  # fmt: skip
    assert train.wait() == 0
    assert follower is None or follower.wait() == 0
    return seconds_of_updates(run), len(list(run.glob("evaluations/*/result.json")))


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
        assert started(*words, f"out={reference}", core=1).wait() == 0
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
    print(told("followed to alone", ratios))


if __name__ == "__main__":
    main()
