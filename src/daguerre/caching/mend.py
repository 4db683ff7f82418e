"""Rows of a cache that are damaged or gone while a run reads them: encoded again, so that the run goes on."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from daguerre.caching import encode
from daguerre.caching.encode import Caption
from daguerre.caching.fill import Filling
from daguerre.data.cached import rows
from daguerre.data.cached.rows import Lost, Rows, Writer
from daguerre.data.cached.source import CachedSource, Frames, image_digest
from daguerre.data.images import decode
from daguerre.data.images.headers import Undecodable
from daguerre.data.loading.collate import retrying
from daguerre.data.plan.buckets import Bucket
from daguerre.errors import UserError
from daguerre.types import REFERENCES, Record

CHANGED = "cached row that is damaged or gone, of an image that has changed since"


@dataclass
class Mender:
    """Encodes rows again with the encoders of a run, which are there meanwhile."""

    filling: Filling
    doing: Callable[[str], AbstractContextManager[None]]
    """Around work that others wait for."""
    mended: int = 0
    """Rows that were encoded again."""
    _said: bool = field(default=False, repr=False)

    def __call__(self, source: CachedSource, number: int, frames: Frames, bucket: Bucket, text: str) -> CachedSource:
        """The source with rows for these parts of a sample's images and this caption. `Undecodable` where an image is
        another one now; UserError where there is no encoder, or no room for the encoders."""
        whole = replace(source, images=_now(source.images), texts=_now(source.texts))
        fact = source.fact(number)
        assert fact is not None
        features, name = whole.features_of(fact), source.name(number)
        for image, key in features.keys(frames).items() if whole.images is not None else ():
            if whole.images is not None and _is_lost(whole.images, key):
                pixels = self._image(source, number, image, features.digests[image])
                sized, _ = decode.sized(pixels, source.settings, None if image in REFERENCES else bucket)
                self._write(name, whole.images, key, frames[image].apply(sized), encode.encode_images)
        if whole.texts is not None and _is_lost(whole.texts, key := features.text_key(frames, text)):
            self._write(name, whole.texts, key, self._caption(source, number, text), encode.encode_texts)
        return replace(whole, images=_now(source.images), texts=_now(source.texts))

    def _caption(self, source: CachedSource, number: int, text: str) -> Caption:
        """A caption with the reference images that it is read with. `Undecodable`, UserError."""
        if not source.pictured:
            return Caption(text)
        return self.filling.needed.caption(text, self._record(source, number), source.settings)

    def _image(self, source: CachedSource, number: int, name: str, digest: bytes) -> bytes | np.ndarray:
        """An image of a sample as it was encoded. `Undecodable` where it is another one now; UserError."""
        image = self._record(source, number).images.get(name)
        if image is None or image_digest(image) != digest:
            raise Undecodable(CHANGED)
        return image

    def _record(self, source: CachedSource, number: int) -> Record:
        if source.inner is None:
            raise UserError(
                f"{source.name(number)}: {rows.LOST}, and data.source=cache has no images to encode it from. Fill "
                "the cache from its images (daguerre cache RECIPE data.path=IMAGES), then run the same command again",
                code="damaged",
            )
        return retrying(source.inner.record, number)

    def _write(self, name: str, held: Rows, key: bytes, value: Any, act: Callable[..., list[rows.Row]]) -> None:
        filling = self.filling
        try:
            with self.doing("encoding a damaged row again"), filling.present():
                (row,) = act(filling.parts, filling.config.cache, [value], [name])
        except torch.OutOfMemoryError:
            raise UserError(
                f"{name}: {rows.LOST}, and there is no memory left to encode it while training. `daguerre cache "
                "RECIPE` encodes it; then run the same command again",
                code="resources",
            ) from None
        writer = Writer(held.folder, 1)
        writer.add(key, row)
        writer.flush()
        self.mended += 1
        if not self._said:
            filling.say(
                f"{filling.cache.name}: {name}: {rows.LOST}; it was encoded again, as others will be without a line. "
                "`daguerre cache verify RECIPE` finds all of them, `daguerre cache RECIPE` encodes them"
            )
        self._said = True


def _now(held: Rows | None) -> Rows | None:
    """The rows that are there by now."""
    return None if held is None else Rows.found(held.folder)


def _is_lost(held: Rows, key: bytes) -> bool:
    try:
        held.read(key)
    except Lost:
        return True
    return False
