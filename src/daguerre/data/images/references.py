"""Reference images of a sample: as many as it has, each in a size of its own that follows from the family's rule."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from torch import Tensor

from daguerre.data.images import decode, kinds
from daguerre.data.images.decode import Frame
from daguerre.data.images.headers import Undecodable
from daguerre.data.settings import SharedSettings
from daguerre.types import REFERENCES, SEEN, Record, References

Sizes = Mapping[str, tuple[int, int]]
"""Upright heights and widths of images by name."""
NO_SIZES: Sizes = MappingProxyType({})
_LEAST_SIDE_PX, _MOST_SIDE_PX = 64, 4096
"""Of a picture that is padded."""
_LESS = 0.995
"""Factor of its scale, until it fits."""
_MOST_AREA = 2
"""Most that a narrow picture may have of the rule's area, once its shorter side is one step."""


def frames(
    images: Mapping[str, bytes | np.ndarray], rule: References, formats: Sequence[str], sizes: Sizes = NO_SIZES
) -> dict[str, Frame]:
    """The frames of a record's reference images in their order, by their headers, or by `sizes` where only features are
    read. `Undecodable` where there are more or fewer than the family reads, or one is missing among them."""
    held = [name for name in REFERENCES if name in images or name in sizes]
    expected = REFERENCES[: max(len(held), rule.least)]
    # A shorter list would move each picture to another place, and "the second image" would be another one.
    if missing := [name for name in expected if name not in held]:
        raise Undecodable(kinds.lacking(missing[0], needed=True))
    if len(held) > rule.most:
        raise Undecodable(f"{len(held)} reference images, more than the {rule.most} that the family reads")
    found, rule = {}, rule.of(len(held))
    for name in held:
        with kinds.named(name):
            size = sizes[name] if name in sizes else decode.upright_px(images[name], formats)
            found[name] = frame(size, rule)
    return found


def dropped(record: Record) -> Record:
    """The sample without reference images."""
    images = {name: own for name, own in record.images.items() if name not in REFERENCES}
    return replace(record, images=images, sizes={n: own for n, own in record.sizes.items() if n not in REFERENCES})


def frame(size: tuple[int, int], rule: References) -> Frame:
    """The frame of a reference image of this upright (height, width): the whole of it, but for what is cropped so that
    both sides are multiples of a step. Nothing is random. `Undecodable` for a picture that is too narrow."""
    if rule.pads:
        return _padded(size, rule)
    step = rule.step_px
    scale = math.sqrt(rule.max_px / (size[0] * size[1]))
    scale = max(scale if rule.enlarges else min(scale, 1.0), step / min(size))
    if size[0] * size[1] * scale**2 > _MOST_AREA * rule.max_px:
        raise Undecodable(f"too narrow: one side has less than {step} px once the image has {rule.max_px} px in all")
    if rule.stretches:
        height, width = resized = tuple(max(step, round(side * scale / step) * step) for side in size)
    else:
        resized = tuple(max(step, int(side * scale)) for side in size)
        height, width = (side // step * step for side in resized)
    top, left = (resized[0] - height) // 2, (resized[1] - width) // 2
    return Frame(size, (resized[0], resized[1]), top, left, height, width, False, rule.interpolation)


def _padded(size: tuple[int, int], rule: References) -> Frame:
    """The frame of a picture that is kept whole. It is scaled down by small steps until it fits with its padding, as
    Black Forest Labs' and diffusers' code does."""
    step = rule.step_px
    scale = min(1.0, math.sqrt(rule.max_px / (size[0] * size[1])), _MOST_SIDE_PX / max(size))
    while True:
        height, width = resized = (max(1, round(size[0] * scale)), max(1, round(size[1] * scale)))
        height, width = (min(_MOST_SIDE_PX, max(_LEAST_SIDE_PX, -(-side // step) * step)) for side in resized)
        if height * width <= rule.max_px:
            break
        scale *= _LESS
    top, left = (height - resized[0]) // 2, (width - resized[1]) // 2
    return Frame(size, resized, -top, -left, height, width, False, rule.interpolation)


def cut(
    images: Mapping[str, bytes | np.ndarray],
    chosen: Mapping[str, Frame],
    settings: SharedSettings,
    seen: References | None = None,
) -> dict[str, Tensor]:
    """The parts of the images that their frames show, [3, h, w] uint8 each, and by the names of `SEEN` their copies by
    the rule `seen`. `Undecodable`."""
    found = {}
    for name in (name for name in chosen if name in images):
        with kinds.named(name):
            whole_HWC = decode.sized(images[name], settings, None)[0]
            found[name] = chosen[name].apply(whole_HWC)
            if seen is not None:
                found[SEEN[name]] = frame(chosen[name].size, seen).apply(whole_HWC)
    return found
