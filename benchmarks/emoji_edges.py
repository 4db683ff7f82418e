#!/usr/bin/env python3
"""Whether a ControlNet of the recipe `emoji_controlnet` keeps outlines that it has never seen, against its base.

python benchmarks/emoji_edges.py RUN [OUT]                    # OUT: a picture of some of them

COUNT emoji of the subgroups that RUN left out are drawn again from their edges, without a prompt, at three strengths
from the same noise; 0 is the base alone. The figure is F1 of Canny's edges within one pixel: the harmonic mean of the
share of the given edges that the picture has, and of the picture's that were given. The difference from the base is
paired by picture, with its 95 % interval of Student's t.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from emoji_style import COUNT, SIDE_PX, paired, pictures
from PIL import Image

import daguerre
from daguerre.conditions import canny
from daguerre.conditions.condition import drawing
from daguerre.data.sources.emoji import Settings

STRENGTHS = (0.0, 0.5, 1.0)
LEFT_OUT = 'subgroup in ["sport", "musical-instrument", "transport-ground", "tool", "office"]'
SHOWN = 10
GAP_PX = 6


def edges(picture_HWC: np.ndarray) -> np.ndarray:
    """[H, W] bool."""
    return canny.apply(canny.Settings(), picture_HWC, drawing(0, "", (0, 0, 0)))[:, :, 0] > 0


def beside(edges_HW: np.ndarray) -> np.ndarray:
    """[H, W] bool: pixels that are an edge or touch one."""
    around = np.pad(edges_HW, 1)
    height, width = edges_HW.shape
    return np.any([around[y : y + height, x : x + width] for y in range(3) for x in range(3)], axis=0)


def kept(given_HW: np.ndarray, found_HW: np.ndarray) -> float:
    """F1 in [0, 1] of edges within one pixel; 0 where one of the pictures has none."""
    if not (given_HW.any() and found_HW.any()):
        return 0.0
    recall, precision = beside(found_HW)[given_HW].mean(), beside(given_HW)[found_HW].mean()
    return float(2 * recall * precision / (recall + precision)) if recall + precision else 0.0


def sheet(rows: list[list[np.ndarray]]) -> Image.Image:
    side = SIDE_PX + GAP_PX
    whole = Image.new("RGB", (len(rows[0]) * side + GAP_PX, len(rows) * side + GAP_PX), "white")
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            whole.paste(Image.fromarray(picture), (GAP_PX + x * side, GAP_PX + y * side))
    return whole


def main(run: str, *out: str) -> None:
    left_out = [*pictures(Settings(filters=LEFT_OUT, resolution=SIDE_PX)).values()]
    real = [left_out[i * len(left_out) // COUNT] for i in range(COUNT)]
    given = [edges(picture) for picture in real]
    model = daguerre.load(run)
    drawn: dict[float, list[np.ndarray]] = {}
    with TemporaryDirectory() as folder:
        for number, picture in enumerate(real):
            Image.fromarray(picture).save(Path(folder) / f"{number:03d}.png")
        for strength in STRENGTHS:
            asked = ("seed=0", f"control_from={folder}", f"controlnet_conditioning_scale={strength:g}")
            drawn[strength] = [np.asarray(one) for one in model.generate("", *asked)]
    found = {s: np.array([kept(*pair) for pair in zip(given, map(edges, drawn[s]), strict=True)]) for s in STRENGTHS}
    for strength in STRENGTHS:
        rest = f", less base: {paired(found[strength] - found[0.0])}" if strength else ""
        print(f"strength {strength:g}: F1 of edges {found[strength].mean():.4f}, mean of {COUNT}{rest}")
    for place in out:
        chosen = range(0, COUNT, COUNT // SHOWN)
        lines = [np.repeat(one[:, :, None] * np.uint8(255), 3, axis=2) for one in given]
        rows = [[each[i] for i in chosen] for each in (real, lines, drawn[0.0], drawn[1.0])]
        sheet(rows).save(place, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
