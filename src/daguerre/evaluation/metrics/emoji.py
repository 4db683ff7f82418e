"""Metric of the `emoji` source: which of all real emoji a generated picture is nearest to, and of which colour it is.

A picture shows colour and layout at 16 px, and what the thing is by the features of a network (DINOv2), which sees far
less of it in small models. The autoencoder alone is the ceiling of both
(`benchmarks/autoencoders.py VAE emoji`). Known prompts measure memory; held-out combinations and `copies` say of what.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from PIL import Image, ImageColor

from daguerre.data.dataset import open_datasets
from daguerre.data.sources.emoji import Emoji, EmojiSource
from daguerre.data.sources.emoji import Settings as SourceSettings
from daguerre.evaluation.metric import FeatureNetwork, Inputs, MetricSettings, source_of
from daguerre.evaluation.result import Result, Row

SIDE_PX = 16
COPY_RMS = 8.0
"""Of 255, at 16 px: below it a picture counts as a copy of one that was trained on."""
MARKS = {"known": 0.83, "held_out_colour": 0.9}
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "brown")
SHAPES = ("circle", "square", "heart")
_AT_ONCE = 32
"""Images that a network reads at once."""
_BACKGROUND = 24
"""Levels of 255 up to which a pixel is background."""


class Settings(MetricSettings):
    """Pictures of known and of held-out emoji, compared with those of the font."""

    own_samples: ClassVar[bool] = True

    name: Literal["emoji"] = "emoji"
    """Nearest real emoji of generated ones; prompts and their number are those of the source."""
    by: Literal["rgb", "dinov2"] = "rgb"
    """What is compared: colours at 16 px, or features of DINOv2 (networks.dinov2), whose cosine counts."""


def small(images: Sequence[np.ndarray]) -> np.ndarray:
    """[n, 768] float32: images [H, W, 3] uint8 at 16 px, as means of squares, 0 to 255."""
    sized = [Image.fromarray(image).resize((SIDE_PX, SIDE_PX), Image.Resampling.BOX) for image in images]
    return np.array([np.asarray(each, np.float32).ravel() for each in sized], np.float32)


def distances(features_nd: np.ndarray, real_Nd: np.ndarray) -> np.ndarray:
    """[n, N] root of the mean square between features."""
    return np.array([np.sqrt(np.square(real_Nd - own).mean(axis=1)) for own in features_nd])


def among(distances_nN: np.ndarray, wanted: Sequence[int], most: int) -> float:
    """Share in [0, 1] of images whose own emoji is among the `most` nearest."""
    own = distances_nN[np.arange(len(wanted)), list(wanted)]
    return float(((distances_nN < own[:, None]).sum(axis=1) < most).mean())


def colour(image: np.ndarray, background: str) -> np.ndarray:
    """Median [3] of the pixels that are not of a background `#rrggbb`; NaN where all are."""
    pixels = image.reshape(-1, 3).astype(np.float32)
    shown = np.abs(pixels - np.array(ImageColor.getrgb(background)[:3])).max(axis=1) > _BACKGROUND
    return np.median(pixels[shown], axis=0) if shown.any() else np.full(3, np.nan)


def other_colours(asked: Emoji, emoji: Sequence[Emoji]) -> list[int]:
    """Numbers of the emoji that show the same in another colour or skin tone, and of itself; [] where nothing but one
    emoji shows it."""
    found = [number for number, other in enumerate(emoji) if _cell(other) == _cell(asked) is not None]
    return found if len(found) > 1 else []


def _cell(one: Emoji) -> str | None:
    if one.tone is not None:
        return one.name.removesuffix(f", {one.tone} skin tone")
    first, _, rest = one.name.partition(" ")
    return rest if first in COLOURS and rest in SHAPES else None


def right_colours(
    asked: Sequence[Emoji], images: Sequence[np.ndarray], real: dict[Emoji, np.ndarray], background: str
) -> list[bool]:
    """Of each image whose emoji exists in other colours or skin tones: whether its colour is nearest to that of its
    own."""
    found, emoji = [], [*real]
    for one, image in zip(asked, images, strict=True):
        own = colour(image, background)
        cells = [emoji[number] for number in other_colours(one, emoji)]
        if cells:
            away = [np.linalg.norm(colour(real[other], background) - own) for other in cells]
            found.append(not np.isnan(own).any() and cells[int(np.argmin(away))] == one)
    return found


def evaluate(settings: Settings, inputs: Inputs) -> dict[str, Result]:
    """Draws known emoji, evenly over all that were trained on, and held-out ones, and compares them with all real
    ones. UserError for another source."""
    source = source_of(inputs, SourceSettings, "metric emoji compares with pictures of the source `emoji`")
    known, held_out = trained_on(source), trained_on(source, "held_out")
    real = {**known, **held_out}
    asked = [_evenly([*each], source.checked_prompts) for each in (known, held_out)]
    texts = [source.captions.text or source.captions.prefix + one.name for each in asked for one in each]
    images = list(inputs.draw(texts))
    network: FeatureNetwork | None = None
    if settings.by == "dinov2":
        network = inputs.network("dinov2", resize="pillow_bicubic")
    away = distances(features(images, network), features([*real.values()], network))
    numbers = {one: number for number, one in enumerate(real)}
    first = len(asked[0])
    found: dict[str, float] = {}
    for name, own, theirs in (("known", asked[0], away[:first]), ("held_out", asked[1], away[first:])):
        if own:
            wanted = [numbers[one] for one in own]
            found |= {name: among(theirs, wanted, 1), f"{name}_top5": among(theirs, wanted, 5)}
    if right := right_colours(asked[1], images[first:], real, source.alpha_colour):
        found["held_out_colour"] = float(np.mean(right))
    nearest = distances(small(images[:first]), small([*known.values()])).min(axis=1)
    found["copies"] = float((nearest < COPY_RMS).mean())
    rows = tuple(Row(name, value, MARKS.get(name) if network is None else None) for name, value in found.items())
    by = "16 px RGB" if network is None else network.label
    note = (
        f"Nearest of {len(real):,} real emoji by {by}. copies: known ones within {COPY_RMS:g} of 255 of a picture that "
        "was trained on"
    )
    return {"emoji" if network is None else f"emoji-{network.label}": Result(len(images), rows, note)}


def trained_on(source: SourceSettings, split: Literal["train", "held_out"] = "train") -> dict[Emoji, np.ndarray]:
    """The emoji that are trained on, or held out, each with its picture (resolution, resolution, 3) uint8."""
    (dataset,) = open_datasets(source, [split])
    own, chosen = dataset.members[0].source, dataset.selections[0]
    assert isinstance(own, EmojiSource)
    assert chosen is not None
    emoji = [own.drawn[number] for number in chosen.numbers[:].tolist()]
    side = (source.resolution, source.resolution)
    pictures = [Image.fromarray(own.picture(one.text)).resize(side, Image.Resampling.BICUBIC) for one in emoji]
    return {one: np.asarray(each) for one, each in zip(emoji, pictures, strict=True)}


def features(images: Sequence[np.ndarray], network: FeatureNetwork | None = None) -> np.ndarray:
    """[n, d] float32 by which images [H, W, 3] uint8 are compared: `small`, or what a network makes of them, of length
    1."""
    if network is None:
        return small(images)
    parts = [network.compute(images[i : i + _AT_ONCE]) for i in range(0, len(images), _AT_ONCE)]
    features_nd = np.concatenate(parts)
    return np.asarray(features_nd / np.linalg.norm(features_nd, axis=1, keepdims=True))


def _evenly(emoji: Sequence[Emoji], most: int) -> list[Emoji]:
    """At most so many of them, at equal distances."""
    count = min(most, len(emoji))
    return [emoji[i * len(emoji) // count] for i in range(count)]
