#!/usr/bin/env python3
"""Whether a LoRA of another publisher's emoji draws those that it has never seen in their style, against its base.

python benchmarks/emoji_style.py RUN BASE FOLDER [DINOV2]     # FOLDER: that publisher's pictures; DINOV2: its weights

Of 100 emoji that the base was trained on and the LoRA was not, drawn by both from the same noise: the distance of a
picture to the publisher's less its distance to the font's. Below 0 it is nearer to the publisher's. The difference of
LoRA and base is paired by emoji, with its 95 % interval of Student's t. Distances are the root of the mean square at
16 px and, where DINOv2 is given, that of its features of length 1.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

import daguerre
from daguerre.data.sources.emoji import Settings
from daguerre.evaluation.metrics import emoji
from daguerre.evaluation.networks import dinov2
from daguerre.evaluation.networks.place import NetworkPlace

COUNT = 100
SIDE_PX = 64
STRENGTHS = (0.5, 1.0)
STUDENT = 1.984
"""97.5 % of Student's t with 99 degrees of freedom."""

Features = Callable[[Sequence[np.ndarray]], np.ndarray]


def pictures(settings: Settings) -> dict[str, np.ndarray]:
    """Those that are trained on, [64, 64, 3] uint8, by the emoji's name."""
    return {one.name: picture for one, picture in emoji.trained_on(settings).items()}


def source(run: str) -> Settings:
    (found,) = daguerre.load(run).config.data.sources.values()
    assert isinstance(found, Settings)
    return found


def by_dinov2(place: str) -> Features:
    return partial(emoji.features, network=dinov2.load(NetworkPlace(path=place), torch.device("cpu"), "pillow_bicubic"))


def distance(first_nd: np.ndarray, second_nd: np.ndarray) -> np.ndarray:
    return np.asarray(np.sqrt(np.square(first_nd - second_nd).mean(axis=1)))


def interval(change_n: np.ndarray) -> tuple[float, float, float]:
    """The mean of COUNT differences, and both ends of its 95 % interval of Student's t."""
    mean, half = float(change_n.mean()), float(STUDENT * change_n.std(ddof=1) / np.sqrt(COUNT))
    return mean, mean - half, mean + half


def paired(change_n: np.ndarray) -> str:
    mean, low, high = interval(change_n)
    return f"{mean:8.4f} (95 %: {low:.4f} to {high:.4f})"


def main(run: str, base: str, folder: str, *dino: str) -> None:
    seen, fonts = pictures(source(run)), pictures(source(base))
    publishers = pictures(Settings(font=folder, resolution=SIDE_PX))
    names = [name for name in fonts if name in publishers and name not in seen]
    names = [names[i * len(names) // COUNT] for i in range(COUNT)]
    models = {"base": daguerre.load(base)}
    models |= {f"LoRA at {s:g}": daguerre.load(base, f"use={{{run}: {s}}}") for s in STRENGTHS}
    drawn = {name: [np.asarray(one) for one in model.generate(names, "seed=0")] for name, model in models.items()}
    kinds: dict[str, Features] = {"16 px RGB": emoji.features}
    kinds |= {Path(place).name: by_dinov2(place) for place in dino}
    for kind, features in kinds.items():
        theirs, own = (features([real[name] for name in names]) for real in (publishers, fonts))
        moved = {}
        for name, images in drawn.items():
            found = features(images)
            moved[name] = distance(found, theirs) - distance(found, own)
            print(f"{kind:10} {name:12} nearer to the font by {moved[name].mean():8.4f}, mean of {COUNT}")
        for name in [name for name in models if name != "base"]:
            print(f"{kind:10} {name:12} less base: {paired(moved[name] - moved['base'])}")


if __name__ == "__main__":
    main(*sys.argv[1:])
