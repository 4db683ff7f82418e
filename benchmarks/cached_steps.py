"""The training step on a cache beside the one that reads and encodes images: the same updates in turns, one process.

    python benchmarks/cached_steps.py [--pairs 10] [--images 64] [--recipe quickstart] [key=value ...]

Random images of the recipe's resolution lie in a folder as PNG, with captions. Both loaders are made in this process
(no workers), so that a step has reading, decoding, encoding and the update in it. Reported: the median over pairs of
the ratio of processor times, without a cache to with one, with its 95 % interval by the bootstrap.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from runs import told

from daguerre.assembly.batch_sizes import batch_sizes
from daguerre.assembly.parts import begin, build
from daguerre.caching import cache, fill
from daguerre.config import config as configs
from daguerre.data.dataset import Dataset, open_datasets
from daguerre.data.loading import loader
from daguerre.data.skipped import Skips
from daguerre.training import device, step
from daguerre.types import Batch


def drawn(folder: Path, count: int, side: int) -> None:
    """Random images with captions."""
    noise = np.random.default_rng(0)
    for number in range(count):
        Image.fromarray(noise.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(folder / f"{number:04}.png")
        (folder / f"{number:04}.txt").write_text(f"image {number}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="daguerre-cached-") as place:
        images = Path(place) / "images"
        images.mkdir()
        given = ["data.source=folder", f"data.path={images}", f"data.cache_dir={place}", "loader.num_workers=0"]
        config = configs.load(options.recipe, [*given, f"cache.path={place}/cache", *options.settings]).config
        drawn(images, options.images, config.data.resolution)
        parts, sizes = build(config, trains=True), batch_sizes(config)
        dataset, held_out = open_datasets(config.data, ["train", "held_out"], parts.images)
        found = cache.opened(config, parts)
        assert found is not None
        filling = fill.Filling(found, config, parts, dataset.members, print)
        filled = fill.filled(filling, cache.wanted(config, dataset, held_out))

        def updates(data: Dataset) -> Iterator[list[Batch]]:
            loading = loader.Loading(
                data, config.loader, config.seed, sizes.whole, sizes.micro, parts.draws, parts.family.truncated,
                Skips(config.data.max_skipped), images=parts.images,
            )  # fmt: skip
            loading.skips.begin()
            with loading.updates(0) as batches:
                yield from ([device.on(parts.device, one) for one in update] for update in batches)

        made = {"without": updates(dataset), "cached": updates(filled.of(dataset, parts.images))}
        states = {name: begin(config, parts) for name in made}
        ratios = []
        for pair in range(-2, options.pairs):  # the first ones warm up
            seconds = {}
            for name in [*made][:: -1 if pair % 2 else 1]:
                began = time.process_time()
                step.update(
                    states[name], next(made[name]), parts.loss, learning_rate=1e-6,
                    max_grad_norm=config.training.max_grad_norm, autocast=parts.autocast,
                )  # fmt: skip
                seconds[name] = time.process_time() - began
            if pair >= 0:
                ratios.append(seconds["without"] / seconds["cached"])
                print(", ".join(f"{name} {1000 * each:.0f} ms" for name, each in seconds.items()), flush=True)
        print(told("without to cached", ratios))


if __name__ == "__main__":
    main()
