"""The contract of every condition: read this before adding one.

A condition computes a control image from the image that is trained on (edges, depth, a picture with holes), or from the
picture that `generate` is given. It is one file in this folder that defines `Settings` (a `ConditionSettings` whose
`name` is the file's name) and one pure function

    def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray

* `pixels_HWC` is [H, W, 3] uint8, RGB, of any size from 1 x 1 on: in training the image after resize, flip and crop. It
  is not changed.
* What comes back is uint8 of the same height and width with 3 channels (RGB) or 4 (RGBA). Alpha 255: known; 0: unknown.
  That is how inpainting and outpainting mark their holes. A pixel is never half known.
* All chance comes from `draw`: numbers that are functions of the seed and the sample (`keys.py`), and in `generate` of
  the seed of the image. So a condition is the same in any worker and process, and after a restart.

It may also define `check(settings) -> None`: UserError where something that it needs is missing; asked before training.

It runs in the workers of the loader, one sample at a time, on one thread, so milliseconds count. It needs numpy and
Pillow alone; one that needs a network imports its library where it is first called, and loads weights once a process.

Whoever reads control images gets them as RGBA, [H, W, 4] or [B, 4, H, W], stored ones too: alpha is 255 or 0, and
colours are 0 where it is 0. A ControlNet sees RGB / 255, and -1 in all channels where alpha is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import numpy as np
from PIL import Image
from pydantic import AfterValidator, SerializeAsAny

from daguerre import keys, plugins
from daguerre.errors import UserError
from daguerre.settings import Plugin, Settings
from daguerre.types import References

Draw = Callable[[str, int], np.ndarray]
"""draw(purpose, count): [count] float64 in [0, 1). Another purpose gives other numbers, the same one the same again."""

Number = TypeVar("Number")


def _in_order(ends: tuple[Any, Any]) -> tuple[Any, Any]:
    if ends[0] > ends[1]:
        raise UserError(f"[least, most]: {ends[0]} is above {ends[1]}")
    return ends


Range = Annotated[tuple[Number, Number], AfterValidator(_in_order)]
"""Annotation of a setting [least, most], from which `drawn` draws."""


class ConditionSettings(Settings):
    """Base of every condition's `Settings`."""

    name: str
    """Name of the condition: a file in conditions."""


OptionalCondition = Annotated[SerializeAsAny[ConditionSettings] | None, Plugin("conditions", "name", ConditionSettings)]
"""Annotation of the setting of an adapter that reads a control image: `condition: OptionalCondition = None`, where None
is an image that the data source stores. Recipes write `condition: canny` or `condition: {name: canny, low: 50}`."""

ControlImages = Mapping[str, ConditionSettings | None]
"""Images that adapters read, by name: computed, or stored by the data source (None)."""
Images = Mapping[str, ConditionSettings | References | None]
"""Further images that are wanted with those that are trained on, by name: computed, or stored by the data source (None,
or the rule by which a family reads reference images)."""
NO_IMAGES: Images = {}


def computed(settings: ConditionSettings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """The control image [H, W, 4] uint8, RGBA, of an image [H, W, 3] uint8, RGB."""
    pixels = plugins.find("conditions", settings.name).apply(settings, pixels_HWC, draw)
    assert pixels.dtype == np.uint8, (settings.name, pixels.dtype)
    assert pixels.shape[:2] == pixels_HWC.shape[:2], (settings.name, pixels.shape, pixels_HWC.shape)
    return with_alpha(pixels)


def check(images: Images) -> None:
    """UserError where something is missing that the conditions of these images need."""
    for settings in images.values():
        if isinstance(settings, ConditionSettings) and (
            own := getattr(plugins.find("conditions", settings.name), "check", None)
        ):
            own(settings)


def references(images: Images) -> References | None:
    """The rule of the reference images among these; None where there are none."""
    return next((asked for asked in images.values() if isinstance(asked, References)), None)


def with_alpha(pixels_HWC: np.ndarray) -> np.ndarray:
    """RGBA [H, W, 4] uint8 of RGB, where all is known, or of RGBA."""
    if pixels_HWC.shape[2] == 4:
        return pixels_HWC
    opaque_HW1 = np.full_like(pixels_HWC[:, :, :1], 255)
    return np.concatenate([pixels_HWC, opaque_HW1], axis=2)


def drawn(value: float | tuple[float, float], draw: Draw, purpose: str) -> float:
    """The value, or one that is drawn evenly from a range [least, most]; for conditions."""
    if not isinstance(value, tuple):
        return value
    return value[0] + (value[1] - value[0]) * float(draw(purpose, 1)[0])


def grey_to_rgb(grey_HW: np.ndarray) -> np.ndarray:
    """[H, W, 3] of one value a pixel [H, W] uint8, for conditions."""
    return np.repeat(grey_HW[:, :, None], 3, axis=2)


def luminance(pixels_HWC: np.ndarray) -> np.ndarray:
    """L = .299 R + .587 G + .114 B [H, W] uint8 (ITU-R BT.601), as Pillow rounds it, for conditions."""
    return np.asarray(Image.fromarray(pixels_HWC).convert("L"))


def with_holes(pixels_HWC: np.ndarray, unknown_HW: np.ndarray) -> np.ndarray:
    """RGBA [H, W, 4] of an image: transparent black where it is unknown; for conditions."""
    made = with_alpha(pixels_HWC)
    made[unknown_HW] = 0
    return made


def drawing(seed: int, image: str, key: Iterable[int]) -> Draw:
    """The random numbers for a control image (`control`, `control_2` ...) of one sample: key is [3], its id, epoch and
    repeat; in `generate` (seed of the image, 0, 0), with the seed of the run."""
    sample_id, epoch, repeat = map(int, key)
    return lambda purpose, count: keys.uniforms(
        seed, f"condition {image} {purpose}", sample_id, epoch, repeat, count=count
    )
