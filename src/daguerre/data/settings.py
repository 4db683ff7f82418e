"""Settings that every data source shares, and those of the loader. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from daguerre.settings import ELASTIC, Settings


class SourceSettings(Settings):
    """What every source's `Settings` starts from. A source's file adds its own fields and narrows `source`."""

    source: str
    """Name of the source: a file in data/sources."""
    resolution: int = Field(512, ge=8)
    """Side of the square pictures that are trained on, in pixels."""
    crop: Literal["center", "random"] = "center"
    """Which square of a picture whose shorter side was resized to `resolution` is taken."""
    random_flip: bool = False
    """Mirror half of the pictures left to right."""
    interpolation: Literal["nearest", "bilinear", "bicubic", "area", "lanczos"] = "bicubic"
    """Filter of the resize."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Share of captions replaced by the family's null caption, so that guidance has something to guide from."""
    shuffle: bool = True
    """Draw a new order each epoch; off: the source's own order."""


class LoaderSettings(Settings):
    """How batches are made ahead of the loop; none of it changes what is trained on."""

    num_workers: int = Field(0, ge=0, json_schema_extra=ELASTIC)
    """Processes that read and decode. 0: a thread of the training process, which is enough for drawn pictures; large
    photographs want 1 or more."""
    prefetch_batches: int = Field(2, ge=1, json_schema_extra=ELASTIC)
    """Batches (each of `per_device_batch_size`) kept ready, or in the making, a worker."""
