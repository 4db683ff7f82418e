#!/usr/bin/env python3
"""What rate, rank, updates and number of pictures do to a style LoRA: the recipe `emoji_lora` with one of them changed.

python benchmarks/emoji_sweep.py FOLDER DINOV2 [AXIS ...]     # FOLDER: Twemoji's pictures; AXIS: rate rank updates ...

Each run is drawn from the same noise as the base: COUNT emoji that no run of any sweep was trained on.
* style: how much nearer they are to the publisher's picture than the base's, less how much nearer to the font's, by
  16 px RGB, of 255 (`emoji_style.py` the other way round: above 0 is learnt), paired, with its 95 % interval;
* own: the share that DINOv2 finds nearest to its own emoji among both publishers' pictures: the base's less this one is
  forgotten;
* like: the share that is nearest to a picture that the LoRA was trained on: what is memorised.
The balance of a run is the harmonic mean of its style, as a share of the highest of the sweep, and of its `own`, as a
share of the base's. The value of each sweep that has the highest is trained with seeds 1 and 2, too. Results are lines
of JSON, a run each, in runs/emoji_sweep.jsonl; what stands there is not trained again.
"""

import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from emoji_style import COUNT, SIDE_PX, Features, by_dinov2, distance, interval, pictures, source

import daguerre
from daguerre.config import config as configs
from daguerre.data.sources.emoji import Settings
from daguerre.evaluation.metrics import emoji

RESULTS = Path("runs/emoji_sweep.jsonl")
BASE = "runs/emoji_unet"
MIDDLE = {"rate": 1e-3, "rank": 16, "updates": 400, "images": 20}
VALUES = {
    "rate": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "rank": (1, 4, 16, 64, 128),
    "updates": (50, 100, 200, 400, 800),
    "images": (5, 10, 20, 40, 80),
}
SEEDS = (1, 2)
BATCH = 16
"""Images of an update of the recipe, of which an epoch has as many at least."""

Point = dict[str, float]


def named(point: Point, seed: int) -> str:
    return "emoji_lora-" + "-".join(f"{name}{value:g}" for name, value in point.items()) + f"-s{seed}"


def train(point: Point, seed: int, names: list[str], folder: str) -> float:
    """The seconds of processor time that a run took."""
    settings = [
        f"run_name={named(point, seed)}",
        f"seed={seed}",
        f"data.font={folder}",
        f"data.sources.style.filters=name in {json.dumps(names)}",
        f"data.repeats={math.ceil(BATCH / len(names))}",
        f"optimizer.learning_rate={point['rate']}",
        f"adapters.lora.rank={point['rank']:g}",
        f"training.duration={point['updates']:g} steps",
        "checkpoint.every=null",
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "daguerre", "train", "emoji_lora", *settings], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Judge:
    """The base's pictures, and the real ones of both publishers, once for all runs."""

    def __init__(self, folder: str, features: Features) -> None:
        self.features = features
        fonts, publishers = pictures(source(BASE)), pictures(Settings(font=folder, resolution=SIDE_PX))
        both = [name for name in fonts if name in publishers]
        first = first_twenty(folder)
        others = [name for name in both if name not in first]
        self.names = [others[i * len(others) // COUNT] for i in range(COUNT)]
        pool = [name for name in others if name not in self.names]
        more = max(VALUES["images"]) - len(first)
        self.trained = first + [pool[i * len(pool) // more] for i in range(more)]
        self.real = [*both, *both]
        self.real_nd = features([*(fonts[name] for name in both), *(publishers[name] for name in both)])
        self.small = [emoji.small([of[name] for name in self.names]) for of in (publishers, fonts)]
        self.base_n = self.nearer_to_font(self.draw())

    def draw(self, *settings: str) -> list[np.ndarray]:
        model = daguerre.load(BASE, *settings)
        return [np.asarray(one) for one in model.generate(self.names, "seed=0")]

    def nearer_to_font(self, images: list[np.ndarray]) -> np.ndarray:
        own_nd, (theirs_nd, fonts_nd) = emoji.small(images), self.small
        return distance(own_nd, theirs_nd) - distance(own_nd, fonts_nd)

    def chosen(self, count: int) -> list[str]:
        """The first of all lists are the recipe's own twenty; fewer are evenly from these."""
        twenty = int(MIDDLE["images"])
        return self.trained[: twenty : twenty // count] if count < twenty else self.trained[:count]

    def judge(self, seen: list[str], *settings: str) -> dict[str, float]:
        images = self.draw(*settings)
        nearest = emoji.distances(self.features(images), self.real_nd).argmin(axis=1)
        found = [self.real[i] for i in nearest]
        mean, low, high = interval(self.base_n - self.nearer_to_font(images))
        own = np.mean([one == name for one, name in zip(found, self.names, strict=True)])
        like = np.mean([self.real[i] in seen and i >= len(self.real) // 2 for i in nearest])
        return {"style": mean, "low": low, "high": high, "own": float(own), "like": float(like)}


def balance(row: dict[str, float], rows: list[dict[str, float]], base: dict[str, float]) -> float:
    most = max(each["style"] for each in rows)
    if row["style"] <= 0 or not row["own"]:
        return 0.0
    learnt, kept = row["style"] / most, row["own"] / base["own"]
    return 2 * learnt * kept / (learnt + kept)


def first_twenty(folder: str) -> list[str]:
    """The names of the recipe's own pictures."""
    own = configs.load("emoji_lora", [f"data.font={folder}"]).config.data.sources["style"]
    assert isinstance(own, Settings)
    return [*pictures(own)]


def main(folder: str, dino: str, *axes: str) -> None:
    judge = Judge(folder, by_dinov2(dino))
    done = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []

    def row(name: str, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        for each in done:
            if each["run"] == name:
                return each
        found = {"run": name, **measure()}
        done.append(found)
        with RESULTS.open("a") as out:
            print(json.dumps(found), file=out)
        print(found, flush=True)
        return found

    def run(point: Point, seed: int) -> dict[str, float]:
        def measure() -> dict[str, float]:
            names, name = judge.chosen(int(point["images"])), named(point, seed)
            return {"seconds": train(point, seed, names, folder), **judge.judge(names, f"use={{runs/{name}: 1}}")}

        return row(named(point, seed), measure)

    base = row("base", lambda: judge.judge([]))
    for axis in axes or VALUES:
        rows = {value: run(MIDDLE | {axis: value}, 0) for value in VALUES[axis]}
        best = max(rows, key=lambda value: balance(rows[value], [*rows.values()], base))
        print(axis, "has its best balance at", best)
        for seed in SEEDS:
            run(MIDDLE | {axis: best}, seed)


if __name__ == "__main__":
    main(*sys.argv[1:])
