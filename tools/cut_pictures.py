#!/usr/bin/env python3
"""Cuts squares of many scales out of pictures, so that a few hundred photographs give thousands of small images.

python tools/cut_pictures.py OUT CROPS FOLDER...      # CROPS squares of each picture below the folders

Each square takes a quarter to the whole of the shorter side, wherever it lies, and is made 64 px wide. Drawings and
photographs alike; transparent pictures lie on white. The same folders give the same squares.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

SIDE_PX = 64
LEAST_SHARE = 0.25
"""Of the shorter side that a square takes."""
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}


def squares(picture: Image.Image, count: int, draw: random.Random) -> Iterator[Image.Image]:
    """`count` squares, none of them enlarged; fewer of a picture that is too small."""
    shorter = min(picture.size)
    least = max(SIDE_PX, round(LEAST_SHARE * shorter))
    for _ in range(count if shorter > least else shorter == SIDE_PX):
        side = draw.randint(least, shorter)
        left, top = draw.randint(0, picture.width - side), draw.randint(0, picture.height - side)
        box = (left, top, left + side, top + side)
        yield picture.resize((SIDE_PX, SIDE_PX), Image.Resampling.BICUBIC, box, reducing_gap=3)


def opened(path: Path) -> Image.Image | None:
    """The picture as RGB on white; None for what is none."""
    try:
        picture = Image.open(path).convert("RGBA")
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    below = Image.new("RGBA", picture.size, "white")
    below.alpha_composite(picture)
    return below.convert("RGB")


def main(arguments: list[str]) -> None:
    out, count, *folders = arguments
    Path(out).mkdir(parents=True)
    written = 0
    for folder in folders:
        for path in sorted(Path(folder).rglob("*")):
            picture = opened(path) if path.suffix.lower() in SUFFIXES and path.is_file() else None
            if picture is None:
                continue
            name = path.relative_to(folder).as_posix()
            for square in squares(picture, int(count), random.Random(name)):
                square.save(Path(out) / f"{written:06d}.png", compress_level=1)
                written += 1
    print(f"{written} squares of {SIDE_PX} px in {out}")


if __name__ == "__main__":
    main(sys.argv[1:])
