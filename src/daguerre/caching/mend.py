"""Rows of a cache that are damaged or gone while a run reads them: encoded again, so that the run goes on."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from daguerre.caching import encode
from daguerre.caching.fill import Filling
from daguerre.data.cached import rows
from daguerre.data.cached.rows import Lost, Rows, Writer
from daguerre.data.cached.source import CachedSource, image_digest, image_key, text_key
from daguerre.data.images import decode
from daguerre.data.images.decode import Frame
from daguerre.data.images.headers import Undecodable
from daguerre.data.loading.collate import retrying
from daguerre.data.plan.buckets import Bucket
from daguerre.errors import UserError
from daguerre.types import IMAGE

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

    def __call__(self, source: CachedSource, number: int, frame: Frame, bucket: Bucket, text: str) -> CachedSource:
        """The source with rows for this part of a sample's image and this caption. `Undecodable` where its image is
        another one now; UserError where there is no encoder, or no room for the encoders."""
        whole = replace(source, images=_now(source.images), texts=_now(source.texts))
        fact = source.fact(number)
        assert fact is not None
        if whole.images is not None and _is_lost(whole.images, key := image_key(fact.image, frame, source.settings)):
            crop = self._crop(source, number, fact.image, frame, bucket)
            self._write(source.name(number), whole.images, key, crop, encode.encode_images)
        if whole.texts is not None and _is_lost(whole.texts, text_key(text)):
            self._write(source.name(number), whole.texts, text_key(text), text, encode.encode_texts)
        return replace(whole, images=_now(source.images), texts=_now(source.texts))

    def _crop(self, source: CachedSource, number: int, digest: bytes, frame: Frame, bucket: Bucket) -> torch.Tensor:
        if source.inner is None:
            raise UserError(
                f"{source.name(number)}: {rows.LOST}, and data.source=cache has no images to encode it from. Fill "
                "the cache from its images (daguerre cache RECIPE data.path=IMAGES), then run the same command again",
                code="damaged",
            )
        image = retrying(source.inner.record, number).images[IMAGE]
        if image_digest(image) != digest:
            raise Undecodable(CHANGED)
        return frame.apply(decode.sized(image, source.settings, bucket)[0])

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
