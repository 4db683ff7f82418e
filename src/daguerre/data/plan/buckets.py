"""Aspect-ratio buckets: the shapes of training images, and the bucket of an image of a given size. No torch here.

All follows from settings and sizes alone, in IEEE-exact operations, so that every rank and worker gets the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np

from daguerre import keys
from daguerre.errors import UserError

if TYPE_CHECKING:
    from daguerre.data.settings import SharedSettings

FEWEST_CELLS = Fraction(9, 10)
"""Least share of resolution^2 of a shape of `auto`; the widest of each height is taken in any case."""
MOST_BUCKETS = 1000
MOST_ASPECT = 8
LEAST_SEEN = Fraction(3, 5)
"""Share of an image of a listed aspect that its bucket must show; else the step is too coarse for that aspect."""
TOO_SMALL = "smaller than its bucket (data.buckets.upscale=false)"
_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_FRACTION = re.compile(rf"\s*({_NUMBER})\s*(?:/\s*({_NUMBER})\s*)?")


@dataclass(frozen=True, order=True)
class Bucket:
    """One shape of training images."""

    height_px: int
    width_px: int

    def __post_init__(self) -> None:
        if self.height_px < 1 or self.width_px < 1:
            raise ValueError(f"a bucket of {self} px is empty: both sides must be 1 or more")

    def __str__(self) -> str:
        return f"{self.width_px}x{self.height_px}"

    @property
    def aspect(self) -> float:
        """Width over height."""
        return self.width_px / self.height_px

    @property
    def area_px(self) -> int:
        return self.height_px * self.width_px

    @property
    def mirrored(self) -> Bucket:
        return Bucket(self.width_px, self.height_px)

    def covering(self, height_px: int, width_px: int) -> tuple[int, int]:
        """Height and width to which an image of that size is resized, so that it just covers the bucket."""
        scale = max(self.height_px / height_px, self.width_px / width_px)
        return max(self.height_px, round(height_px * scale)), max(self.width_px, round(width_px * scale))


@dataclass(frozen=True)
class Assigned:
    """The buckets of N images."""

    numbers: np.ndarray
    """[N] int16: indexes into `buckets(settings)`; -1 for an image that is left out."""
    left_out: Mapping[str, int]
    """Counts by reason."""
    enlarged: np.ndarray
    """[N] bool: kept, but smaller than its bucket."""


def check_fractions(values: tuple[float | str, ...]) -> tuple[float | str, ...]:
    """The aspect ratios as they were given. UserError for what is not a ratio."""
    if not values:
        raise UserError("an empty list: give one aspect ratio at least, such as 1/1")
    for value in values:
        _fraction(value)
    return values


def buckets(settings: SharedSettings) -> tuple[Bucket, ...]:
    """All shapes of a source, sorted, each once. UserError if the settings allow none."""
    found = {bucket for level in _levels(settings) for bucket in level}
    if len(found) > MOST_BUCKETS:
        raise _too_many(settings.buckets.step)
    return tuple(sorted(found))


def check_not_idle(settings: SharedSettings) -> None:
    """UserError if `auto` gives only the shape squares, so that it would have no effect."""
    if settings.buckets.aspects == "auto" and max(map(len, _levels(settings))) == 1:
        raise UserError(
            f"data.buckets.aspects=auto gives only the shape {' and '.join(map(str, buckets(settings)))}: lower "
            f"data.buckets.step ({settings.buckets.step} px), raise data.buckets.max_aspect "
            f"({settings.buckets.max_aspect:g}) or the resolution, or choose aspects=square",
            code="unused",
            setting="data.buckets.aspects",
        )


def assign(
    settings: SharedSettings, heights_px: np.ndarray, widths_px: np.ndarray, ids: np.ndarray | None = None
) -> Assigned:
    """The bucket of each image of these upright sizes [N], 0 if unknown, and sample ids [N] int64, by which a share
    `random` goes to any other shape; without ids none does.

    Of each resolution's buckets the one with the nearest aspect, by |log|; of the resolutions the largest whose bucket
    the image fills without being enlarged, else the smallest. UserError if an unknown size would decide something.
    """
    every = buckets(settings)
    number_of = {bucket: number for number, bucket in enumerate(every)}
    unknown = (heights_px < 1) | (widths_px < 1)
    _check_known(settings, every, unknown)
    aspects = widths_px / np.maximum(heights_px, 1)
    numbers = np.zeros(len(heights_px), dtype=np.int16)
    fills = np.zeros(len(heights_px), dtype=bool)
    for rank, level in enumerate(_levels(settings)):
        own = np.array([bucket.aspect for bucket in level])  # ascending; halfway between two, the taller is chosen
        chosen = np.searchsorted(np.sqrt(own[:-1] * own[1:]), aspects, side="left")
        if ids is not None and settings.buckets.random:
            drawn = keys.hashed_uniforms("random bucket", ids)
            anywhere = keys.hashed_uniforms("which bucket", ids) * len(level)
            chosen = np.where(drawn < settings.buckets.random, anywhere.astype(chosen.dtype), chosen)
        tall = np.array([bucket.height_px for bucket in level])[chosen]
        wide = np.array([bucket.width_px for bucket in level])[chosen]
        filled = (heights_px >= tall) & (widths_px >= wide)
        taken = filled | (rank == 0)
        numbers[taken] = np.array([number_of[bucket] for bucket in level], dtype=np.int16)[chosen[taken]]
        fills |= filled
    small = ~fills & ~unknown
    if settings.buckets.upscale:
        return Assigned(numbers, {}, small)
    numbers[small] = -1
    left_out = {TOO_SMALL: int(small.sum())} if small.any() else {}
    return Assigned(numbers, left_out, np.zeros_like(small))


def _too_many(step_px: int) -> UserError:
    return UserError(
        f"data.buckets: more than {MOST_BUCKETS:,} buckets, and each global batch is of one bucket: raise "
        f"data.buckets.step ({step_px} px), lower max_aspect, or list the aspects",
        setting="data.buckets",
    )


def _check_known(settings: SharedSettings, every: Sequence[Bucket], unknown: np.ndarray) -> None:
    needed = len(every) > 1 or not settings.buckets.upscale
    if needed and (count := int(unknown.sum())):
        why = f"there are {len(every)} buckets" if len(every) > 1 else "data.buckets.upscale is false"
        raise UserError(
            f"data.buckets: the sizes of {count:,} of {len(unknown):,} images are not in the index (those of "
            f"images at addresses never are), and {why}. Make shards of them with `daguerre data pack`, or train on "
            "squares of one resolution with upscale=true",
            code="missing",
            setting="data.buckets",
        )


def _levels(settings: SharedSettings) -> list[tuple[Bucket, ...]]:
    """The buckets of each resolution, smallest resolution first; sorted by aspect, without duplicates."""
    chosen = settings.buckets
    resolutions = sorted(set(chosen.resolutions or (settings.resolution,)))
    if chosen.aspects == "square":
        return [(Bucket(side, side),) for side in resolutions]
    for side in resolutions:
        if side < chosen.step:
            name = "data.buckets.resolutions" if chosen.resolutions else "data.resolution"
            raise UserError(
                f"{name}: {side} px is smaller than data.buckets.step ({chosen.step} px), and the sides of buckets "
                "are multiples of it, so no bucket is possible. Lower the step or raise the resolution",
                setting=name,
            )
    if chosen.aspects == "auto":
        return [_auto(side, chosen.step, chosen.max_aspect) for side in resolutions]
    return [_distinct(_best(side, chosen.step, value) for value in chosen.aspects) for side in resolutions]


@lru_cache(maxsize=64)
def _auto(resolution_px: int, step_px: int, max_aspect: float) -> tuple[Bucket, ...]:
    """All shapes of `step` with 90 to 100 % of the area, the widest of each height, and the square; mirrored."""
    cells = resolution_px**2 // step_px**2
    fewest = -(-FEWEST_CELLS * resolution_px**2 // step_px**2)
    side = isqrt(cells)
    if side > MOST_BUCKETS:
        raise _too_many(step_px)
    shapes = [(side, side)]
    for high in range(max(isqrt(fewest), 1), int(min(cells, side * max_aspect + 2)) + 1):
        widest = cells // high
        shapes += [(low, high) for low in range(max(1, min(widest, int(-(-fewest // high)))), widest + 1)]
    for low in range(1, side + 1):
        shapes.append((low, cells // low))
    return _distinct(Bucket(low * step_px, high * step_px) for low, high in shapes if low <= high <= max_aspect * low)


@lru_cache(maxsize=4096)
def _best(resolution_px: int, step_px: int, value: float | str) -> Bucket:
    """The shape within the area that shows most pixels of an image of this aspect; of several, the nearest aspect."""
    wanted = _fraction(value)
    wanted = max(wanted, 1 / wanted)
    cells = resolution_px**2 // step_px**2
    shapes = []
    for low in range(1, isqrt(cells) + 1):
        whole = int(wanted * low)  # between its neighbours and the others nothing is gained
        shapes += [(low, min(max(high, low), cells // low)) for high in (whole, whole + 1)]
    low, high = max(shapes, key=lambda s: (min(s[0] * wanted, Fraction(s[1])), -_off(Fraction(s[1], s[0]), wanted)))
    bucket = Bucket(low * step_px, high * step_px)
    if 1 / _off(Fraction(high, low), wanted) < LEAST_SEEN:
        raise UserError(
            f"data.buckets.aspects: {value} cannot be made of steps of {step_px} px at a resolution of "
            f"{resolution_px}: the nearest shape is {bucket}. Lower data.buckets.step, raise the resolution, or remove "
            "this aspect",
            setting="data.buckets.aspects",
        )
    return bucket


def _off(aspect: Fraction, wanted: Fraction) -> Fraction:
    """The factor, 1 or more, by which two aspects differ."""
    return max(aspect / wanted, wanted / aspect)


def _distinct(shapes: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """The shapes and their mirror images, by aspect; of equal aspects the largest."""
    by_aspect: dict[Fraction, Bucket] = {}
    for shape in sorted(shapes, key=lambda bucket: bucket.area_px):
        for bucket in (shape, shape.mirrored):
            by_aspect[Fraction(bucket.width_px, bucket.height_px)] = bucket
    return tuple(by_aspect[aspect] for aspect in sorted(by_aspect))


def _fraction(value: float | str) -> Fraction:
    """An aspect ratio exactly as written: a number, or "a/b". UserError for anything else."""
    text = format(value, ".9f") if isinstance(value, int | float) else value
    match = _FRACTION.fullmatch(text)
    if match is None or not Fraction(match[1]) or not Fraction(match[2] or 1):
        raise UserError(f"{value!r} is not an aspect ratio: write a number above 0, or two such as 2/3")
    fraction = Fraction(match[1]) / Fraction(match[2] or 1)
    if not Fraction(1, MOST_ASPECT) <= fraction <= MOST_ASPECT:
        raise UserError(f"{value!r} is too extreme: aspect ratios go from 1/{MOST_ASPECT} to {MOST_ASPECT}")
    return fraction
