"""Samples as training makes them in its first epoch, for people to look at: captions, frames and pixels."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from daguerre.cli.data.opened import Opened, is_remote
from daguerre.conditions.condition import NO_IMAGES, Images
from daguerre.data import captions
from daguerre.data.images import decode, references
from daguerre.data.images.decode import Frame
from daguerre.data.images.headers import Undecodable
from daguerre.data.plan import buckets as bucketing
from daguerre.data.settings import SourceSettings
from daguerre.types import IMAGE, REFERENCES, Record, References

_READERS = 8
"""Threads that read remote samples."""


@dataclass(frozen=True)
class Seen:
    """A sample that can be read."""

    record: Record
    caption: str | None
    """Without dropout; None if the caption fields are empty."""
    key: np.ndarray
    """[3] int64: sample id, epoch 0, repeat 0."""


@dataclass(frozen=True)
class Lost:
    """A sample that cannot be used."""

    name: str
    reason: str


def usable(data: Opened) -> Opened:
    """Drops the samples that no bucket takes."""
    if data.index is None:
        return data
    columns = (data.index.heights_px[:], data.index.widths_px[:], data.index.ids[:])
    numbers = bucketing.assign(data.settings, *columns).numbers
    return replace(data, passes=data.passes & (numbers >= 0))


def seen(data: Opened, numbers: np.ndarray, seed: int) -> Iterator[Seen | Lost]:
    """The samples of these numbers, in their order."""
    plain = data.settings.model_copy(update={"caption_dropout": 0.0})
    source = data.reading(numbers)

    def one(number: int) -> Seen | Lost:
        key = np.array([source.sample_id(number), 0, 0], dtype=np.int64)
        try:
            record = source.record(number)
        except Undecodable as error:
            return Lost(source.name(number), str(error))
        try:
            return Seen(record, captions.choose(record, plain, seed, key), key)
        except Undecodable:
            return Seen(record, None, key)

    with ThreadPoolExecutor(_READERS if is_remote(source) else 1) as readers:
        yield from readers.map(one, numbers.tolist())


def framed(
    sample: Seen, settings: SourceSettings, seed: int, computed: Images = NO_IMAGES
) -> tuple[Frame, dict[str, Tensor]]:
    """The sample's frame and its images as training has them, in its bucket, [C, H, W] uint8 each: all that it has, and
    those to be computed. Raises `Undecodable`."""
    images = sample.record.images
    height, width = decode.upright_px(images[IMAGE], settings.formats)
    number = int(bucketing.assign(settings, np.array([height]), np.array([width]), sample.key[:1]).numbers[0])
    if number < 0:
        raise Undecodable(bucketing.TOO_SMALL)
    stored = dict.fromkeys(name for name in images if name != IMAGE and name not in REFERENCES)
    bucket, wanted = bucketing.buckets(settings)[number], {**stored, **computed}
    frames, cut = decode.cut(images, settings, bucket, seed, sample.key, wanted)
    read = references.frames(images, References(most=len(REFERENCES)), settings.formats)
    return frames[IMAGE], cut | references.cut(images, read, settings)
