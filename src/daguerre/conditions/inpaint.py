"""The condition `inpaint`: the image with random holes, which are unknown."""

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from pydantic import Field

from daguerre.conditions.condition import ConditionSettings, Draw, Range, drawn, with_holes

Share = Annotated[float, Field(ge=0, le=1)]
Shape = Literal["box", "ellipse", "stroke"]
_NUMBERS = 17
"""Random numbers of a hole: its shape, centre, sides and path."""
_PATH = 6
"""Points of a stroke."""
_TRIAL_PX = 128
"""Longest side of the image on which the size of holes is found."""
_TRIALS = 12


class Settings(ConditionSettings):
    """The image with holes at random places; what is under them is unknown."""

    name: Literal["inpaint"] = "inpaint"
    """The image with random holes."""
    share: Share | Range[Share] = (0.1, 0.5)
    """Share of the area that is unknown; [least, most]: drawn for each sample."""
    shapes: tuple[Shape, ...] = Field(("box", "ellipse", "stroke"), min_length=1)
    """Shapes of holes; one is drawn for each."""
    holes: int = Field(4, ge=1, le=32)
    """Most holes of an image; from 1 up, their number is drawn."""
    inverted: Share = 0.0
    """Share of samples of which the holes alone are known, and all else is not."""


class Hole(NamedTuple):
    """A hole in units of the image's sides, at scale 1."""

    shape: Shape
    centre: tuple[float, float]
    sides: tuple[float, float]
    path: tuple[tuple[float, float], ...]


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 4]: transparent black in the holes, whose size is such that they have the share that was drawn."""
    size = pixels_HWC.shape[1], pixels_HWC.shape[0]
    share = drawn(settings.share, draw, "share")
    inverted = bool(draw("inverted", 1)[0] < settings.inverted)
    count = 1 + int(draw("holes", 1)[0] * settings.holes)
    holes = [_hole(settings.shapes, draw(f"hole {i}", _NUMBERS)) for i in range(count)]
    inside_HW = _drawn(holes, _scale(holes, size, 1 - share if inverted else share), size)
    return with_holes(pixels_HWC, ~inside_HW if inverted else inside_HW)


def _hole(shapes: Sequence[Shape], chance: np.ndarray) -> Hole:
    kind, x, y, width, height, *path = chance.tolist()
    points = tuple((x + path[i] - 0.5, y + path[i + 1] - 0.5) for i in range(0, 2 * _PATH, 2))
    return Hole(shapes[int(kind * len(shapes))], (x, y), (0.25 + width, 0.25 + height), points)


def _scale(holes: Sequence[Hole], size: tuple[int, int], share: float) -> float:
    """The scale at which the holes have this share of the area, by bisection on a small image."""
    if share in (0, 1):
        return 4.0 * share  # all is covered from 4 on, wherever the centre is
    small = Image.new("1", size)
    small.thumbnail((_TRIAL_PX, _TRIAL_PX))
    low, high = 0.0, 4.0
    for _ in range(_TRIALS):
        middle = (low + high) / 2
        too_much = _drawn(holes, middle, small.size).mean() > share
        low, high = (low, middle) if too_much else (middle, high)
    return (low + high) / 2


def _drawn(holes: Sequence[Hole], scale: float, size: tuple[int, int]) -> np.ndarray:
    """[H, W] bool: inside of a hole."""
    canvas = Image.new("L", size)
    if not scale:
        return np.asarray(canvas) > 0
    pen, (across, down) = ImageDraw.Draw(canvas), size
    for hole in holes:
        (x, y), (width, height) = hole.centre, hole.sides
        box = [(x - width * scale) * across, (y - height * scale) * down]
        box += [(x + width * scale) * across - 1, (y + height * scale) * down - 1]
        if hole.shape == "stroke":
            _stroke(pen, [(px * across, py * down) for px, py in hole.path], width * scale * min(size) / 2)
        elif box[0] <= box[2] and box[1] <= box[3]:
            (pen.rectangle if hole.shape == "box" else pen.ellipse)(box, fill=255)
    return np.asarray(canvas) > 0


def _stroke(pen: ImageDraw.ImageDraw, path: Sequence[tuple[float, float]], radius: float) -> None:
    """A line with round ends and corners."""
    pen.line(path, fill=255, width=max(1, round(2 * radius)))
    for x, y in path:
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=255)
