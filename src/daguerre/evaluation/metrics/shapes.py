"""Metric of the `shapes` source: reads background, colour, shape and size off pixels, without a network.

The images and their facts (palette, radii, outlines) are `daguerre.data.sources.shapes`.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from daguerre.data.sources.shapes import (
    COLOURS,
    IMAGE_PX,
    QUICKSTART_SHAPES,
    RADII_PX,
    Combination,
    Prompt,
    Shape,
    coverage,
    open_source,
    prompts,
)
from daguerre.data.sources.shapes import Settings as SourceSettings
from daguerre.evaluation.metric import Draw, Inputs, MetricSettings, Redraw, source_of
from daguerre.evaluation.result import Result, Row

NONE = "none"
ATTRIBUTES = ("background", "colour", "shape", "size")
Marks = Mapping[str, tuple[float | None, float | None]]
"""By the names of rows: the share that must be reached, and the one to aim at."""
MARKS: Marks = {"background": (0.95, 0.98), "colour": (0.95, 0.98), "shape": (0.80, 0.95), "size": (0.80, 0.90)}
"""Those of the quickstart."""

_BORDER_PX = 2
_BORDER_SHARE = 0.7  # of the border must show one colour for it to be the background
_COLOUR_DISTANCE = 70.0  # in RGB levels: farther from each palette colour than this is no colour
_FRONT_PX = 20  # fewer pixels of a second colour are a speck, not a shape
_FRONT_REACH = 0.75  # of the largest distance from the background is clearly the shape
_FRONT_SHARE = 0.75  # of what is clearly the shape must show one colour
_STRANGE_SHARE = 0.25  # of the shape's area may show neither of the two colours nor a blend
_OFF_PX = 1.0  # mean distance from the ideal outline up to which a shape has a name
_MARGIN = 0.03  # of overlap (intersection over union) by which its ideal outline must fit better than any other
_SIZE_FACTOR = 1.25  # a radius farther than this factor from each size is no size


class Settings(MetricSettings):
    """The checker of the `shapes` source."""

    own_samples: ClassVar[bool] = True

    name: Literal["shapes"] = "shapes"
    """Reads background, colour, shape and size off the images; prompts and their number are those of the source."""


@dataclass(frozen=True)
class Reading:
    """Attributes of an image; each is a word of the `shapes` source, or "none": unreadable."""

    background: str
    colour: str
    shape: str
    size: str


def check(image: np.ndarray, named: Sequence[Shape] = QUICKSTART_SHAPES) -> Reading:
    """Read a (64, 64, 3) uint8 image that may show one of the shapes `named`; any other is "none". Raises `ValueError`
    for an array of another shape or dtype."""
    if image.shape != (IMAGE_PX, IMAGE_PX, 3) or image.dtype != np.uint8:
        raise ValueError(
            f"the shapes checker reads ({IMAGE_PX}, {IMAGE_PX}, 3) uint8 images, "
            f"not {image.shape} {image.dtype}: decode or resize the image first"
        )
    pixels = image.astype(np.float32)
    labels = _nearest_colours(pixels)
    background = _background(labels)
    if background == NONE:
        return Reading(NONE, NONE, NONE, NONE)
    colour = _front_colour(pixels, labels, background)
    if colour == NONE:
        return Reading(background, NONE, NONE, NONE)
    shape, radius_px = _outline(_sharpened(_covered(pixels, background, colour)), named)
    return Reading(background, colour, shape, NONE if shape == NONE else _size(radius_px))


def shares(
    asked: Sequence[Prompt], images: Sequence[np.ndarray], named: Sequence[Shape] = QUICKSTART_SHAPES
) -> dict[str, float]:
    """Share in [0, 1] of images that show what their prompt asks for: by attribute, and `all` four."""
    seen = [check(image, named) for image in images]
    right = np.array(
        [
            [getattr(prompt.combination, name) == getattr(one, name) for name in ATTRIBUTES]
            for prompt, one in zip(asked, seen, strict=True)
        ],
        dtype=bool,
    )
    table = {name: float(right[:, i].mean()) for i, name in enumerate(ATTRIBUTES)}
    return table | {"all": float(right.all(axis=1).mean())}


def overlap(image: np.ndarray, original: np.ndarray) -> float:
    """Share in [0, 1] of the area of either shape that both cover (intersection over union): the shape in an image and
    that in the one which its outline was taken from. 0 if either has none."""
    masks = []
    for pixels in (image, original):
        seen = check(pixels)
        if seen.colour == NONE:
            return 0.0
        masks.append(_sharpened(_covered(pixels.astype(np.float32), seen.background, seen.colour)))
    return float(np.minimum(*masks).sum() / np.maximum(*masks).sum())


def evaluate(settings: Settings, inputs: Inputs) -> dict[str, Result]:
    """Generates prompts of combinations that training never saw, and reads the images. Where a new shape is learnt,
    `kept` has the quickstart's own prompts, in its measure. A model that reads control images gets those of held-out
    images, and `outline` is the mean overlap with their shapes."""
    source = source_of(inputs, SourceSettings, "metric shapes reads images of the source `shapes`")
    new = tuple(shape for shape in source.shapes if shape not in QUICKSTART_SHAPES)
    named = (*QUICKSTART_SHAPES, *new)
    if inputs.redraw is not None:
        return {"shapes": _redrawn(source, inputs.redraw, named)}
    asked = prompts(
        "held_out", source.checked_prompts, 0, source.shapes, source.num_images, source.look, source.preferred_size
    )
    found = {"shapes": _drawn(asked, inputs.draw, named, _marks(source))}
    if new and source.kept_prompts:
        found["kept"] = _drawn(prompts("held_out", source.kept_prompts, 0), inputs.draw, QUICKSTART_SHAPES, MARKS)
    return found


def _marks(source: SourceSettings) -> Marks:
    return MARKS if source.marks is None else {name: (share, None) for name, share in source.marks.items()}


def _drawn(asked: Sequence[Prompt], draw: Draw, named: Sequence[Shape], marks: Marks) -> Result:
    images = list(draw([prompt.text for prompt in asked]))
    return _result(shares(asked, images, named), len(asked), marks)


def _redrawn(settings: SourceSettings, redraw: Redraw, named: Sequence[Shape]) -> Result:
    source = open_source(settings, "held_out")
    records = [source.record(number) for number in range(settings.checked_prompts)]
    texts = [settings.captions.text or record.texts[settings.captions.used[0]] for record in records]
    asked = [Prompt(text, Combination(**record.metadata)) for text, record in zip(texts, records, strict=True)]
    originals = [np.asarray(record.image) for record in records]
    images = list(redraw(texts, originals))
    outline = float(np.mean([overlap(*pair) for pair in zip(images, originals, strict=True)]))
    return _result({"outline": outline, **shares(asked, images, named)}, len(asked), _marks(settings))


def _result(found: Mapping[str, float], count: int, marks: Marks) -> Result:
    return Result(count, tuple(Row(name, value, *marks.get(name, ())) for name, value in found.items()))


def _nearest_colours(pixels: np.ndarray) -> np.ndarray:
    """Index of each pixel's palette colour, -1 where none is near: (64, 64) int."""
    palette = np.array(list(COLOURS.values()), np.float32)
    squared = np.square(pixels[:, :, None, :] - palette).sum(axis=-1)
    return np.where(squared.min(axis=-1) <= _COLOUR_DISTANCE**2, squared.argmin(axis=-1), -1)


def _background(labels: np.ndarray) -> str:
    inner = slice(_BORDER_PX, -_BORDER_PX)
    on_border = np.ones(labels.shape, bool)
    on_border[inner, inner] = False
    border = labels[on_border]
    counts = np.bincount(border[border >= 0], minlength=len(COLOURS))
    return list(COLOURS)[int(counts.argmax())] if counts.max() >= _BORDER_SHARE * border.size else NONE


def _front_colour(pixels: np.ndarray, labels: np.ndarray, background: str) -> str:
    """The one colour of what is not background. Edges blend two colours and are nearer to it, so the pixels
    that lie farthest from it decide; where many pixels are no blend of the two, no colour is named."""
    names = list(COLOURS)
    distance = np.linalg.norm(pixels - _levels(background), axis=-1)
    reach = float(np.sort(distance, axis=None)[-_FRONT_PX:].mean())
    front = labels[distance >= _FRONT_REACH * reach]
    counts = np.bincount(front[front >= 0], minlength=len(names))
    colour = names[int(counts.argmax())]
    if colour == background or counts.max() < max(_FRONT_PX, _FRONT_SHARE * front.size):
        return NONE
    covered = _covered(pixels, background, colour)
    blend = _levels(background) + covered[..., None] * (_levels(colour) - _levels(background))
    strange = np.linalg.norm(pixels - blend, axis=-1) > _COLOUR_DISTANCE
    return colour if strange.sum() <= _STRANGE_SHARE * covered.sum() else NONE


def _levels(colour: str) -> np.ndarray:
    return np.array(COLOURS[colour], np.float32)


def _covered(pixels: np.ndarray, background: str, colour: str) -> np.ndarray:
    """The share of the shape in each pixel, between the two colours: (64, 64) float32 in [0, 1]."""
    across = _levels(colour) - _levels(background)
    return np.clip((pixels - _levels(background)) @ across / np.square(across).sum(), 0.0, 1.0)


def _sharpened(covered: np.ndarray) -> np.ndarray:
    return np.clip((covered - 0.2) / 0.6, 0.0, 1.0)


@functools.cache
def _unit_area(shape: Shape) -> float:
    radius_px = 20.0
    return float(coverage(shape, radius_px, (0.0, 0.0)).sum()) / radius_px**2


def _outline(mask: np.ndarray, named: Sequence[Shape]) -> tuple[str, float]:
    """The shape whose ideal outline at the mask's centre and area overlaps it best, of those `named`; its radius in
    pixels."""
    area = float(mask.sum())
    axis = np.arange(IMAGE_PX) - (IMAGE_PX - 1) / 2
    centre_px = (float(mask.sum(axis=0) @ axis) / area, float(mask.sum(axis=1) @ axis) / area)
    radii = {shape: (area / _unit_area(shape)) ** 0.5 for shape in named}
    ideals = {shape: _sharpened(coverage(shape, radii[shape], centre_px)) for shape in named}
    overlaps = {
        shape: float(np.minimum(mask, ideal).sum() / np.maximum(mask, ideal).sum()) for shape, ideal in ideals.items()
    }
    second, best = sorted(overlaps, key=overlaps.__getitem__)[-2:]
    clear = overlaps[best] >= overlaps[second] + _MARGIN and _off_px(mask, ideals[best]) <= _OFF_PX
    return (best, radii[best]) if clear else (NONE, 0.0)


def _off_px(mask: np.ndarray, ideal: np.ndarray) -> float:
    """Mean distance between the outlines: the area between them over the length of the ideal one."""
    length = np.abs(np.diff(ideal, axis=0)).sum() + np.abs(np.diff(ideal, axis=1)).sum()
    return float(np.abs(mask - ideal).sum() / length)


def _size(radius_px: float) -> str:
    factors = {name: max(radius_px / ideal, ideal / radius_px) for name, ideal in RADII_PX.items()}
    best = min(factors, key=factors.__getitem__)
    return best if factors[best] <= _SIZE_FACTOR else NONE
