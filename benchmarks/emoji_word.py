#!/usr/bin/env python3
"""Whether the word of the recipe `emoji_word` shows what its pictures show, against the words that it started from.

python benchmarks/emoji_word.py RUN BASE [DINOV2]             # DINOV2: its weights

COUNT pictures of <clock> by RUN and of its first words by BASE, from the same noise, are compared with the clock faces
of the font that were not trained on: the mean of their distances, and how often one of them is the nearest of those and
of all emoji that BASE was trained on. The difference is paired by noise, with its 95 % interval of Student's t.
"""

import sys
from pathlib import Path

import numpy as np
from emoji_style import COUNT, SIDE_PX, Features, by_dinov2, paired, pictures, source

import daguerre
from daguerre.data.sources.emoji import Settings
from daguerre.evaluation.metrics import emoji

WORD, FIRST_WORDS = "<clock>", "white circle"
CLOCKS = (
    'subgroup == "time" and name not in ["hourglass done", "hourglass not done", "watch", "alarm clock", "stopwatch", '
    '"timer clock", "mantelpiece clock"]'
)


def main(run: str, base: str, *dino: str) -> None:
    seen = pictures(source(run))
    clocks = pictures(Settings(filters=CLOCKS, resolution=SIDE_PX))
    unseen = [picture for name, picture in clocks.items() if name not in seen]
    others = [*pictures(source(base)).values()]
    asked = {WORD: daguerre.load(run), FIRST_WORDS: daguerre.load(base)}
    drawn = {
        word: [np.asarray(one) for one in model.generate(word, "seed=0", f"num_images={COUNT}")]
        for word, model in asked.items()
    }
    kinds: dict[str, Features] = {"16 px RGB": emoji.features}
    kinds |= {Path(place).name: by_dinov2(place) for place in dino}
    for kind, features in kinds.items():
        real = features([*unseen, *others])
        away = {word: emoji.distances(features(images), real) for word, images in drawn.items()}
        for word, found in away.items():
            nearest = (found.argmin(axis=1) < len(unseen)).mean()
            mean = found[:, : len(unseen)].mean()
            print(
                f"{kind:10} {word:12} {mean:8.4f} away from {len(unseen)} others, nearest to one {100 * nearest:.0f} %"
            )
        change = (away[WORD] - away[FIRST_WORDS])[:, : len(unseen)].mean(axis=1)
        print(f"{kind:10} {WORD} less {FIRST_WORDS}: {paired(change)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
