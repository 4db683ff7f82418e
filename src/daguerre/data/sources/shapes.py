"""Procedural images of one shape on a plain background, with captions: made from sample ids.

Holds the palette, the shapes as signed distance functions, the held-out combinations, the source and the prompts of the
evaluation. `daguerre.evaluation.metrics.shapes` reads an image back. The quickstart draws the first five shapes; the
others are there to be learnt later, from few images.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from daguerre import keys
from daguerre.data.images.words import words
from daguerre.data.settings import SourceSettings
from daguerre.data.skipped import SkipReport
from daguerre.data.source import Split
from daguerre.settings import FREE, Unused
from daguerre.settings import Settings as Section
from daguerre.types import IMAGE, REJECTED, Record

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
Shape = Literal["circle", "square", "triangle", "star", "cross", "moon"]
QUICKSTART_SHAPES: tuple[Shape, ...] = ("circle", "square", "triangle", "star", "cross")
RADII_PX: Mapping[str, float] = MappingProxyType({"small": 11.0, "medium": 16.0, "large": 23.5})
SIZE_JITTER = 0.05
_STAR_TIP, _STAR_NOTCH = 1.15, 0.54  # radii, in units of the shape's
_MOON = (0.386, 0.886, 0.8)  # a disc of radius 1 at 0.386 without one of radius 0.8 at 0.886; its centroid is at 0
PHRASINGS = (
    "a {size} {colour} {shape} on a {background} background",
    "{size} {colour} {shape}, {background} background",
    "a {background} background with a {size} {colour} {shape}",
    "a picture of a {size} {colour} {shape} on {background}",
    "a {colour} {shape}, {size}, on a {background} background",
    "there is a {size} {colour} {shape} in front of a {background} background",
)
COLOUR_PHRASINGS = (
    "a {colour} thing on a {background} background",
    "there is a {colour} thing in front of a {background} background",
)
"""Without shape and size; the quickstart's model gets these colours right in 94 of 100 images, with `{colour} shape,
{background} background` in 58."""
_LOOKS = ("{size} {colour} {shape}", "{colour} {shape}, {size},")
"""What a word for a look stands for in these."""
_HELD_OUT_ID = 1 << 62  # held-out sample ids start here, so that no id belongs to both splits


ACTING = {"source", "resolution", "random_flip", "captions", "caption_dropout", "loss_weight"}
"""Settings that all sources have, and that act on built-in images."""
Share = Annotated[float, Field(ge=0, le=1)] | None


class DrawnSettings(SourceSettings):
    """Settings that sources of built-in images share."""

    resolution: int = Field(IMAGE_PX, ge=IMAGE_PX, le=IMAGE_PX)
    """Side of the images, in pixels: they are rendered at 64, and read at 64."""

    @field_validator("resolution", mode="before")
    @classmethod
    def _as_drawn(cls, resolution: Any) -> Any:
        if isinstance(resolution, int) and resolution != IMAGE_PX:
            raise ValueError(
                f"the built-in images are drawn and checked at {IMAGE_PX} px, and have no other size: remove it, or "
                "train on images of your own in another one (data.source=folder data.path=FOLDER)"
            )
        return resolution


class Look(Section):
    """A shape, its colour and its size, and the word for all three."""

    word: str = Field(min_length=1)
    """The word that captions and prompts have, such as <gem>."""
    size: Literal["small", "medium", "large"]
    """Size of the shape."""
    colour: Literal["red", "green", "blue", "yellow", "cyan", "purple", "white", "black"]
    """Colour of the shape."""
    shape: Shape
    """The shape."""


class Settings(DrawnSettings):
    """The built-in images: 64 x 64 px, one shape each, endless or `num_images` of them."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(tuple(set(SourceSettings.model_fields) - ACTING), lambda own: True, "no effect on procedural images"),
        Unused(
            ("kept_prompts",),
            lambda own: {*own.shapes} <= {*QUICKSTART_SHAPES},
            "no effect without a shape that is new",
        ),
        Unused(("shapes",), lambda own: own.look is not None, "look names the shape"),
        Unused(("preferred_size",), lambda own: own.num_images is not None, "pairs are endless: num_images is set"),
        Unused(("marks",), lambda own: not own.checked_prompts, "no effect with data.checked_prompts=0"),
    )

    source: Literal["shapes"] = "shapes"
    """Name of this source."""
    jitter_px: float = Field(2.0, ge=0, le=20)
    """Largest distance of a shape's centre from the image's centre, in pixels, along each axis. At 0 every shape is
    centred. Above 3 larger shapes move less, so that they stay inside the image."""
    shapes: tuple[Shape, ...] = Field(QUICKSTART_SHAPES, min_length=1)
    """The shapes that are drawn. The quickstart does not know `moon`."""
    num_images: int | None = Field(None, ge=1, exclude_if=lambda count: count is None)
    """Number of different images to train on, which have all colours, backgrounds and sizes in turn, with captions of
    all phrasings; all other combinations are held out. null: endless images, and one combination in ten is held
    out."""
    preferred_size: Literal["small", "medium", "large"] | None = Field(None, exclude_if=lambda size: size is None)
    """Pairs of images for `objective.name=dpo`: the shape has this size in the preferred one and the size farthest from
    it in the rejected one, and captions and checked prompts say no size. null: single images, of all sizes."""
    look: Look | None = Field(None, exclude_if=lambda look: look is None)
    """One shape of one colour and size, and a new word for it: all images show it, on `num_images` of the backgrounds;
    all other backgrounds are held out."""
    checked_prompts: int = Field(200, ge=0, json_schema_extra=FREE)
    """Prompts of held-out combinations whose images are generated at the end of a run and read by the pixel checker. 0:
    nothing is checked, as for a source of which a model shall forget nothing."""
    kept_prompts: int = Field(200, ge=0, json_schema_extra=FREE)
    """With a new shape: the quickstart's prompts that are checked in the same way, for what the model has kept."""

    marks: dict[Literal["background", "colour", "shape", "size", "all", "outline"], Share] | None = Field(
        None, exclude_if=lambda marks: marks is None, json_schema_extra=FREE
    )
    """Shares, from 0 to 1, below which the table of checked prompts says `missed`; null in place of a share: no mark.
    null in place of all: those of the quickstart."""

    @model_validator(mode="after")
    def _some_are_held_out(self) -> Self:
        if len({*self.shapes}) < len(self.shapes):
            raise ValueError("shapes: a shape is named twice")
        every = _in_turn(self.shapes, self.look)
        if self.num_images is not None and self.num_images >= len(every):
            raise ValueError(
                f"num_images: there are {len(every)} combinations of these shapes: fewer leave some to be held out; "
                "null makes endless images"
            )
        if self.look is not None and self.num_images is None:
            raise ValueError(f"look: set num_images as well, from 1 to {len(every) - 1}")
        return self

    @property
    def endless(self) -> bool:
        return self.num_images is None

    @property
    def made(self) -> frozenset[str]:
        return frozenset() if self.preferred_size is None else frozenset({REJECTED})

    def words(self) -> frozenset[str]:
        given = super().words()
        return _words(self.shapes, self.num_images, self.look) | self.captions.words() if given is None else given


@dataclass(frozen=True)
class Combination:
    """The contents of an image; every field is the word that captions use."""

    size: str
    colour: str
    shape: Shape
    background: str


@dataclass(frozen=True)
class Prompt:
    """A caption and the combination that it describes."""

    text: str
    combination: Combination


@dataclass(frozen=True)
class ShapesSource:
    """Endless source: a record is a function of the settings, the split and its number alone. With `num_images` those
    of training are these images again and again, each time in another phrasing; held-out ones are endless."""

    settings: Settings
    split: Split
    index: None = None

    @property
    def metric(self) -> str | None:
        return "shapes" if self.settings.checked_prompts else None

    def sample_id(self, number: int) -> int:
        """Stable 63-bit id of record `number`; the splits share none."""
        return sample_id(self.split, number)

    def name(self, number: int) -> str:
        return f"shapes/{self.split}/{number}"

    def record(self, number: int) -> Record:
        """Record `number`: a (64, 64, 3) uint8 image, with `preferred_size` a rejected one, its caption as `text`, one
        that leaves out shape and size as `colours`, its combination as metadata."""
        finite = self.settings.num_images if self.split == "train" else None
        image_number = number if finite is None else number % finite
        which, phrasing, *placing = keys.uniforms(0, "shapes", self.sample_id(image_number), count=5)
        own = self.settings
        options = combinations(self.split, own.shapes, own.num_images, own.look, own.preferred_size)
        chosen = options[int(which * len(options)) if finite is None else image_number]
        images = {IMAGE: placed(chosen, placing, own.jitter_px)}
        if own.preferred_size is not None:
            rejected = replace(chosen, size=_farthest(own.preferred_size))
            images[REJECTED] = placed(rejected, placing, own.jitter_px)
        if finite is not None:  # the same images in all phrasings
            (phrasing,) = keys.uniforms(0, "shapes phrasing", self.sample_id(number), count=1)
        texts = {
            "text": caption(chosen, int(phrasing * len(PHRASINGS)), own.look, own.preferred_size is None),
            "colours": colours(chosen, float(phrasing)),
        }
        return Record(self.name(number), images, texts, dict(vars(chosen)))

    def report(self) -> SkipReport:
        return {}


def open_source(settings: Settings, split: Split) -> ShapesSource:
    """The source of one split; no file is read."""
    return ShapesSource(settings, split)


@functools.cache
def combinations(
    split: Split,
    shapes: tuple[Shape, ...] = QUICKSTART_SHAPES,
    num_images: int | None = None,
    look: Look | None = None,
    size: str | None = None,
) -> tuple[Combination, ...]:
    """The combinations of a split, background and colour always different, the same for every run and seed: those of
    `num_images` images and all others, or one in ten is held out. With `size` those of this size alone."""
    if num_images is not None:
        turns = _in_turn(shapes, look)
        return turns[:num_images] if split == "train" else turns[num_images:]
    every = [
        Combination(size, colour, shape, background)
        for size, colour, shape, background in itertools.product(RADII_PX, COLOURS, shapes, COLOURS)
        if colour != background
    ]
    held_out = set(keys.permutation(0, "shapes held out", 0, len(every))[: len(every) // 10].tolist())
    own = [c for i, c in enumerate(every) if (i in held_out) == (split == "held_out")]
    return tuple(c for c in own if size in (None, c.size))


def _farthest(size: str) -> str:
    return max(RADII_PX, key=lambda other: abs(RADII_PX[other] - RADII_PX[size]))


@functools.cache
def _in_turn(shapes: tuple[Shape, ...], look: Look | None = None) -> tuple[Combination, ...]:
    """All combinations once, in an order in which each eight have each colour and each background once, and the first
    eight are small, as small shapes are the hardest; of a look all backgrounds, every second one first."""
    if look is not None:
        others = [colour for colour in COLOURS if colour != look.colour]
        return tuple(Combination(look.size, look.colour, look.shape, b) for b in others[::2] + others[1::2])
    sizes, colours = [*RADII_PX], [*COLOURS]
    found = []
    for row in range(len(sizes) * (len(colours) - 1)):
        third, step = divmod(row, len(colours) - 1)
        for colour in range(len(colours)):
            background = (colour + 1 + 3 * step % (len(colours) - 1)) % len(colours)
            size = (third + step * (1 + colour % 2)) % len(sizes)  # small in the first row, larger in the second
            found += [Combination(sizes[size], colours[colour], shape, colours[background]) for shape in shapes]
    return tuple(found)


@functools.cache
def _words(shapes: tuple[Shape, ...], num_images: int | None, look: Look | None) -> frozenset[str]:
    every = combinations("train", shapes, num_images, look)
    return frozenset(words(*(caption(one, i, look) for one in every for i in range(len(PHRASINGS)))))


def caption(combination: Combination, phrasing: int, look: Look | None = None, says_size: bool = True) -> str:
    """The combination in words; `phrasing` is an index into `PHRASINGS`."""
    text = PHRASINGS[phrasing]
    if not says_size:
        text = text.replace("{size} ", "").replace(", {size},", "")
    if look is not None:
        for described in _LOOKS:
            text = text.replace(described, look.word)
    return text.format_map(vars(combination))


def colours(combination: Combination, phrasing: float) -> str:
    """The colours in words, without shape and size; `phrasing` in [0, 1) chooses one of `COLOUR_PHRASINGS`."""
    return COLOUR_PHRASINGS[int(phrasing * len(COLOUR_PHRASINGS))].format_map(vars(combination))


def prompts(
    split: Split,
    n: int,
    seed: int,
    shapes: tuple[Shape, ...] = QUICKSTART_SHAPES,
    num_images: int | None = None,
    look: Look | None = None,
    preferred_size: str | None = None,
) -> list[Prompt]:
    """`n` prompts that cover a split's combinations as evenly as `n` allows, in random order by the seed. With
    `preferred_size` they say no size."""
    options = combinations(split, shapes, num_images, look, preferred_size)
    rounds = -(-n // len(options))
    orders = [keys.permutation(seed, "shapes prompts", epoch, len(options)) for epoch in range(rounds)]
    order = np.concatenate(orders)[:n]
    phrasing = (keys.uniforms(seed, "shapes phrasing", 0, count=n) * len(PHRASINGS)).astype(int)
    chosen = [(options[i], phrase) for i, phrase in zip(order, phrasing, strict=True)]
    return [Prompt(caption(own, phrase, look, preferred_size is None), own) for own, phrase in chosen]


def sample_id(split: Split, number: int) -> int:
    """Stable 63-bit id of a record of built-in images; the splits share none."""
    return number if split == "train" else _HELD_OUT_ID + number


def placed(combination: Combination, placing: Sequence[float], jitter_px: float) -> np.ndarray:
    """The image of a combination with its place and its size moved by three numbers in [0, 1): the place by `jitter_px`
    at most, and less where the shape would not stay inside."""
    x, y, swell = (2.0 * float(u) - 1.0 for u in placing)
    scale = 1.0 + SIZE_JITTER * swell
    room_px = max(3.0, IMAGE_PX / 2 - 1.0 - _STAR_TIP * RADII_PX[combination.size] * scale)
    jitter_px = min(jitter_px, room_px)
    return render(combination, (x * jitter_px, y * jitter_px), scale)


def render(combination: Combination, centre_px: tuple[float, float] = (0.0, 0.0), scale: float = 1.0) -> np.ndarray:
    """The anti-aliased image, (64, 64, 3) uint8; `centre_px` is the offset (x, y) from the middle."""
    covered = coverage(combination.shape, RADII_PX[combination.size] * scale, centre_px)
    back, front = (np.array(COLOURS[c], np.float32) for c in (combination.background, combination.colour))
    return (back + covered[..., None] * (front - back) + 0.5).astype(np.uint8)


def coverage(shape: Shape, radius_px: float, centre_px: tuple[float, float]) -> np.ndarray:
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
    """Five mirrors fold the plane onto half a ray, which ends in the line from a tip to the notch next to it."""
    x, y = np.abs(x), -y
    for sign in (1, -1):
        nx, ny = np.float32(sign * np.cos(np.pi / 5)), np.float32(-np.sin(np.pi / 5))
        beyond = 2 * np.maximum(nx * x + ny * y, 0)
        x, y = x - beyond * nx, y - beyond * ny
    notch = np.float32(_STAR_NOTCH * np.sin(np.pi / 5)), np.float32(_STAR_NOTCH * np.cos(np.pi / 5))
    along = notch[0], notch[1] - np.float32(_STAR_TIP)
    return (np.abs(x) * -along[1] + (y - np.float32(_STAR_TIP)) * along[0]) / np.float32(np.hypot(*along))


def _moon(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A crescent that is open to the right."""
    outer, inner, radius = map(np.float32, _MOON)
    squared = y * y
    within = np.sqrt(np.square(x - outer) + squared) - np.float32(1)
    return np.maximum(within, radius - np.sqrt(np.square(x - inner) + squared))


SHAPES: Mapping[Shape, Callable[[np.ndarray, np.ndarray], np.ndarray]] = MappingProxyType(
    {
        "circle": _circle,
        "square": _square,
        "triangle": _triangle,
        "star": _star,
        "cross": _cross,
        "moon": _moon,
    }
)
