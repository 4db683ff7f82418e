"""Procedural images of one shape on a plain background, with captions: endless, made from sample ids.

Holds the palette, the shapes as signed distance functions, the held-out combinations, the source and the prompts of the
evaluation. `daguerre.evaluation.shapes` reads an image back.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from daguerre import keys
from daguerre.data.images.words import words
from daguerre.data.settings import SourceSettings
from daguerre.data.skipped import SkipReport
from daguerre.data.source import Split
from daguerre.settings import FREE, Unused
from daguerre.types import IMAGE, Record

IMAGE_PX = 64
COLOURS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "red": (220, 30, 35),
        "green": (30, 160, 50),
        "blue": (35, 60, 215),
        "yellow": (250, 220, 40),
        "cyan": (60, 215, 230),
        "purple": (150, 40, 175),
        "white": (250, 250, 250),
        "black": (12, 12, 12),
    }
)
RADII_PX: Mapping[str, float] = MappingProxyType({"small": 11.0, "medium": 16.0, "large": 23.5})
SIZE_JITTER = 0.05
_STAR_TIP, _STAR_NOTCH = 1.15, 0.54  # radii, in units of the shape's
PHRASINGS = (
    "a {size} {colour} {shape} on a {background} background",
    "{size} {colour} {shape}, {background} background",
    "a {background} background with a {size} {colour} {shape}",
    "a picture of a {size} {colour} {shape} on {background}",
    "a {colour} {shape}, {size}, on a {background} background",
    "there is a {size} {colour} {shape} in front of a {background} background",
)
_HELD_OUT_ID = 1 << 62  # held-out sample ids start here, so that no id belongs to both splits


_ACTING = {"source", "resolution", "random_flip", "captions", "caption_dropout", "loss_weight"}


class Settings(SourceSettings):
    """The built-in images: 64 x 64 px, one shape each."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(tuple(set(SourceSettings.model_fields) - _ACTING), lambda own: True, "no effect on procedural images"),
    )

    source: Literal["shapes"] = "shapes"
    """Name of this source."""
    resolution: int = Field(IMAGE_PX, ge=IMAGE_PX, le=IMAGE_PX)
    """Side of the images, in pixels: they are rendered at 64, and read at 64."""
    jitter_px: float = Field(2.0, ge=0, le=3)
    """Largest distance of a shape's centre from the image's centre, in pixels, along each axis. At 0 every
    shape is centred; up to 3 keeps the largest shape inside the image."""
    checked_prompts: int = Field(200, ge=1, json_schema_extra=FREE)
    """Prompts of held-out combinations whose images are generated at the end of a run and read by the pixel checker."""

    def words(self) -> frozenset[str]:
        given = super().words()
        return _words() | self.captions.words() if given is None else given


@dataclass(frozen=True)
class Combination:
    """The contents of an image; every field is the word that captions use."""

    size: str
    colour: str
    shape: str
    background: str


@dataclass(frozen=True)
class Prompt:
    """A caption and the combination that it describes."""

    text: str
    combination: Combination


@dataclass(frozen=True)
class ShapesSource:
    """Endless source: record `index` is a function of the split and the index alone."""

    settings: Settings
    split: Split
    index: None = None
    metric: str | None = "shapes"

    def sample_id(self, number: int) -> int:
        """Stable 63-bit id of record `number`; the splits share none."""
        return number if self.split == "train" else _HELD_OUT_ID + number

    def name(self, number: int) -> str:
        """The split and the number."""
        return f"shapes/{self.split}/{number}"

    def record(self, number: int) -> Record:
        """Record `number`: a (64, 64, 3) uint8 image, its caption as `text`, its combination as metadata."""
        sample_id = self.sample_id(number)
        which, phrasing, *placing = keys.uniforms(0, "shapes", sample_id, count=5)
        options = combinations(self.split)
        chosen = options[int(which * len(options))]
        x, y, swell = (2.0 * float(u) - 1.0 for u in placing)
        centre_px = (x * self.settings.jitter_px, y * self.settings.jitter_px)
        image = render(chosen, centre_px, scale=1.0 + SIZE_JITTER * swell)
        texts = {"text": caption(chosen, int(phrasing * len(PHRASINGS)))}
        return Record(self.name(number), {IMAGE: image}, texts, asdict(chosen))

    def report(self) -> SkipReport:
        """Empty: nothing is left out."""
        return {}


def open_source(settings: Settings, split: Split) -> ShapesSource:
    """The source of one split; no file is read."""
    return ShapesSource(settings, split)


@functools.cache
def combinations(split: Split) -> tuple[Combination, ...]:
    """The combinations of a split, background and colour always different; one in ten is held out, the same for every
    run and seed."""
    every = [
        Combination(size, colour, shape, background)
        for size, colour, shape, background in itertools.product(RADII_PX, COLOURS, SHAPES, COLOURS)
        if colour != background
    ]
    held_out = set(keys.permutation(0, "shapes held out", 0, len(every))[: len(every) // 10].tolist())
    return tuple(c for i, c in enumerate(every) if (i in held_out) == (split == "held_out"))


@functools.cache
def _words() -> frozenset[str]:
    return frozenset(words(*(caption(one, i) for one in combinations("train") for i in range(len(PHRASINGS)))))


def caption(combination: Combination, phrasing: int) -> str:
    """The combination in words; `phrasing` is an index into `PHRASINGS`."""
    return PHRASINGS[phrasing].format_map(asdict(combination))


def prompts(split: Split, n: int, seed: int) -> list[Prompt]:
    """`n` prompts that cover a split's combinations as evenly as `n` allows, in random order by the seed."""
    options = combinations(split)
    rounds = -(-n // len(options))
    orders = [keys.permutation(seed, "shapes prompts", epoch, len(options)) for epoch in range(rounds)]
    order = np.concatenate(orders)[:n]
    phrasing = (keys.uniforms(seed, "shapes phrasing", 0, count=n) * len(PHRASINGS)).astype(int)
    return [Prompt(caption(options[i], p), options[i]) for i, p in zip(order, phrasing, strict=True)]


def render(combination: Combination, centre_px: tuple[float, float] = (0.0, 0.0), scale: float = 1.0) -> np.ndarray:
    """The anti-aliased image, (64, 64, 3) uint8; `centre_px` is the offset (x, y) from the middle."""
    covered = coverage(combination.shape, RADII_PX[combination.size] * scale, centre_px)
    back, front = (np.array(COLOURS[c], np.float32) for c in (combination.background, combination.colour))
    return (back + covered[..., None] * (front - back) + 0.5).astype(np.uint8)


def coverage(shape: str, radius_px: float, centre_px: tuple[float, float]) -> np.ndarray:
    """The share of each pixel that the shape covers: (64, 64) float32 in [0, 1]."""
    axis = np.arange(IMAGE_PX, dtype=np.float32) - np.float32((IMAGE_PX - 1) / 2)
    x = (axis - np.float32(centre_px[0])) / np.float32(radius_px)
    y = (axis - np.float32(centre_px[1])) / np.float32(radius_px)
    distance_px = SHAPES[shape](x[None, :], y[:, None]) * np.float32(radius_px)
    return np.clip(0.5 - distance_px, 0.0, 1.0)


def _circle(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.sqrt(x * x + y * y) - np.float32(0.95)


def _square(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(x), np.abs(y)) - np.float32(0.85)


def _cross(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    across, along = np.abs(x), np.abs(y)
    longer, shorter = np.maximum(across, along), np.minimum(across, along)
    return np.maximum(longer - np.float32(1.0), shorter - np.float32(0.35))


def _triangle(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A regular one that stands on a side (y grows downwards)."""
    slope = np.float32(np.sqrt(3) / 2) * np.abs(x) - np.float32(0.5) * y
    return np.maximum(y, slope) - np.float32(0.57)


def _star(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Five mirrors fold the plane onto half a ray, which ends in the line from a tip to the notch beside it."""
    x, y = np.abs(x), -y
    for sign in (1, -1):
        nx, ny = np.float32(sign * np.cos(np.pi / 5)), np.float32(-np.sin(np.pi / 5))
        beyond = 2 * np.maximum(nx * x + ny * y, 0)
        x, y = x - beyond * nx, y - beyond * ny
    notch = np.float32(_STAR_NOTCH * np.sin(np.pi / 5)), np.float32(_STAR_NOTCH * np.cos(np.pi / 5))
    along = notch[0], notch[1] - np.float32(_STAR_TIP)
    return (np.abs(x) * -along[1] + (y - np.float32(_STAR_TIP)) * along[0]) / np.float32(np.hypot(*along))


SHAPES: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = MappingProxyType(
    {"circle": _circle, "square": _square, "triangle": _triangle, "star": _star, "cross": _cross}
)
