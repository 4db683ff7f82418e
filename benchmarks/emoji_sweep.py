#!/usr/bin/env python3
"""What rate, rank, updates and number of pictures do to a style LoRA: the recipe `emoji_lora` with one of them changed.

python benchmarks/emoji_sweep.py FOLDER DINOV2 [AXIS ...]     # FOLDER: Twemoji's pictures; AXIS: rate rank updates ...
python benchmarks/emoji_sweep.py show                          # tables, and curves in runs/emoji_sweep.html

Each run is drawn from the same noise as the base: COUNT emoji that no run of any sweep was trained on.
* style: how much nearer they are to the publisher's picture than the base's, less how much nearer to the font's, by
  16 px RGB, of 255 (`emoji_style.py` the other way round: above 0 is learnt), paired, with its 95 % interval;
* own: the share that DINOv2 finds nearest to its own emoji among both publishers' pictures: the base's less this one is
  forgotten; and `own5`, that is among the five nearest to it;
* further: how much further they are from the nearer of their own emoji's two pictures than the base's, by DINOv2, as a
  share of the base's distance, paired, with its interval: what is forgotten, more sharply;
* like: the share that is nearest to a picture that the LoRA was trained on: what is memorised.
The balance of a run is the harmonic mean of its style, as a share of the highest of the sweep, and of its `own5`, as
a share of the base's. The value of each sweep that has the highest is trained with seeds 1 and 2, too. Results are
lines of JSON, a run each, in runs/emoji_sweep.jsonl; what stands there is not trained again, so that the middle of all
sweeps is trained once, and two processes can share the axes.
"""

import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from emoji_style import COUNT, SIDE_PX, Features, by_dinov2, distance, interval, pictures, source

import daguerre
from daguerre.config import config as configs
from daguerre.data.sources.emoji import Settings
from daguerre.evaluation.metrics import emoji
from daguerre.report.charts import MAIN, SECOND
from daguerre.report.html import Html, element, render_page
from daguerre.report.svg import Series, chart

RESULTS = Path("runs/emoji_sweep.jsonl")
BASE = "runs/emoji_unet"
MIDDLE = {"rate": 1e-3, "rank": 16, "updates": 200, "images": 20}
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
Row = dict[str, float]
"""The numbers of a run, and its name under `run`."""


def named(point: Point, seed: int) -> str:
    return "emoji_lora-" + "-".join(f"{name}{value:g}" for name, value in point.items()) + f"-s{seed}"


def results() -> dict[str, Row]:
    """The rows of the runs that are measured, by name."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    return {row["run"]: row for row in rows}


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
        more = int(max(VALUES["images"])) - len(first)
        self.trained = first + [pool[i * len(pool) // more] for i in range(more)]
        self.real = [*both, *both]
        self.real_nd = kept_features(features, [*(fonts[name] for name in both), *(publishers[name] for name in both)])
        self.own = [both.index(name) for name in self.names]
        self.small = [emoji.small([of[name] for name in self.names]) for of in (publishers, fonts)]
        drawn = self.draw()
        self.base_n, self.base_far_n = self.nearer_to_font(drawn), self.far(features(drawn))

    def draw(self, *settings: str) -> list[np.ndarray]:
        model = daguerre.load(BASE, *settings)
        return [np.asarray(one) for one in model.generate(self.names, "seed=0")]

    def nearer_to_font(self, images: list[np.ndarray]) -> np.ndarray:
        own_nd, (theirs_nd, fonts_nd) = emoji.small(images), self.small
        return distance(own_nd, theirs_nd) - distance(own_nd, fonts_nd)

    def far(self, found_nd: np.ndarray) -> np.ndarray:
        """Distances from each image to the nearer of its own emoji's two pictures."""
        half = len(self.real) // 2
        theirs = [self.real_nd[[i + offset for i in self.own]] for offset in (0, half)]
        return np.minimum(*(distance(found_nd, of) for of in theirs))

    def chosen(self, count: int) -> list[str]:
        """The first of all lists are the recipe's own twenty; fewer are evenly from these."""
        twenty = int(MIDDLE["images"])
        return self.trained[: twenty : twenty // count] if count < twenty else self.trained[:count]

    def judge(self, seen: list[str], *settings: str) -> Row:
        images = self.draw(*settings)
        found_nd = self.features(images)
        nearest = emoji.distances(found_nd, self.real_nd).argsort(axis=1)[:, :5]
        own = np.array([[self.real[i] == name for i in of] for of, name in zip(nearest, self.names, strict=True)])
        like = np.mean([self.real[i] in seen and i >= len(self.real) // 2 for i in nearest[:, 0]])
        style = interval(self.base_n - self.nearer_to_font(images))
        further = interval((self.far(found_nd) - self.base_far_n) / self.base_far_n.mean())
        row = {"own": float(own[:, 0].mean()), "own5": float(own.any(axis=1).mean()), "like": float(like)}
        return row | {
            name if end == "mean" else f"{name} {end}": number
            for name, of in (("style", style), ("further", further))
            for end, number in zip(("mean", "low", "high"), of, strict=True)
        }


def kept_features(features: Features, of: Sequence[np.ndarray]) -> np.ndarray:
    """Features of pictures that are the same in every process: minutes, the first time."""
    place = RESULTS.with_suffix(".npy")
    if not place.exists():
        np.save(place, features(of))
    return np.asarray(np.load(place))


def balance(row: Row, rows: list[Row], base: Row) -> float:
    most = max(each["style"] for each in rows)
    if row["style"] <= 0 or not row["own5"]:
        return 0.0
    learnt, kept = row["style"] / most, row["own5"] / base["own5"]
    return 2 * learnt * kept / (learnt + kept)


def first_twenty(folder: str) -> list[str]:
    """The names of the recipe's own pictures."""
    own = configs.load("emoji_lora", [f"data.font={folder}"]).config.data.sources["style"]
    assert isinstance(own, Settings)
    return [*pictures(own)]


def main(folder: str, dino: str, *axes: str) -> None:
    judge = Judge(folder, by_dinov2(dino))

    def row(name: str, measure: Callable[[], Row]) -> Row:
        if name in (rows := results()):
            return rows[name]
        found = measure()
        with RESULTS.open("a") as out:
            print(json.dumps({"run": name} | found), file=out)
        print(name, found, flush=True)
        return found

    def run(point: Point, seed: int) -> Row:
        def measure() -> Row:
            names, name = judge.chosen(int(point["images"])), named(point, seed)
            return {"seconds": train(point, seed, names, folder), **judge.judge(names, f"use={{runs/{name}: 1}}")}

        return row(named(point, seed), measure)

    row("base", lambda: judge.judge([]))
    run(MIDDLE, 0)
    for axis in axes or VALUES:
        for value in VALUES[axis]:
            run(MIDDLE | {axis: value}, 0)
        best = optimum(axis, results())
        print(axis, "has its best balance at", best)
        for seed in SEEDS:
            run(MIDDLE | {axis: best}, seed)


def sweep(axis: str, rows: dict[str, Row]) -> dict[float, Row]:
    """The rows of seed 0, by the value of the axis."""
    points = {value: named(MIDDLE | {axis: value}, 0) for value in VALUES[axis]}
    return {value: rows[name] for value, name in points.items() if name in rows}


def optimum(axis: str, rows: dict[str, Row]) -> float:
    of = sweep(axis, rows)
    return max(of, key=lambda value: balance(of[value], [*of.values()], rows["base"]))


def show() -> None:
    """Print a table of each sweep in Markdown, and write its curves as one page."""
    rows, figures = results(), []
    base = rows["base"]
    print(f"base: {base['own']:.0%}, {base['own5']:.0%} own")
    for axis in VALUES:
        of = sweep(axis, rows)
        if not of:
            continue
        best, others = optimum(axis, rows), [*of.values()]
        again = [name for seed in SEEDS if (name := named(MIDDLE | {axis: best}, seed)) in rows]
        print(f"\n| {axis} | style (95 %) | own, of five nearest | further, % (95 %) | a training picture | balance |")
        print("|---|---|---|---|---|---|")
        for value, row in [*of.items(), *((best, rows[name]) for name in again)]:
            style, further = (
                f"{row[name] * by:.1f} ({row[f'{name} low'] * by:.1f} to {row[f'{name} high'] * by:.1f})"
                for name, by in (("style", 1), ("further", 100))
            )
            own, own5, like = (f"{row[name]:.0%}" for name in ("own", "own5", "like"))
            print(f"| {value:g} | {style} | {own}, {own5} | {further} | {like} | {balance(row, others, base):.2f} |")
        figures.append(curves(axis, of, base))
    what = element("header", element("h1", "What rate, rank, updates and pictures do to a style LoRA"))
    page = render_page("Sweeps", what, element("div", *figures, class_="charts"), str(RESULTS), ("style.css",))
    RESULTS.with_suffix(".html").write_text(page)


def curves(axis: str, of: dict[float, Row], base: Row) -> Html | None:
    """What is learnt and what is kept, each as a share, over the values of an axis."""
    most = max(row["style"] for row in of.values())
    places = [math.log2(value) for value in of]
    learnt, kept = [row["style"] / most for row in of.values()], [row["own5"] / base["own5"] for row in of.values()]
    lines = [
        Series("style learnt", places, learnt, MAIN, dots=True, labels=[f"{value:g}" for value in of]),
        Series("own emoji kept", places, kept, SECOND, dots=True),
    ]
    return chart(axis.capitalize(), "shares of the sweep's best and of the base, over powers of two", lines, over=axis)


if __name__ == "__main__":
    show() if sys.argv[1:] == ["show"] else main(*sys.argv[1:])
