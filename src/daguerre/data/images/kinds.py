"""Kinds of images that a sample may have beside the one that is trained on, and how each is read. No torch here.

A source puts them into `Record.images` under these names. They are cropped as the image itself (`decode.Frame`).
"""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from daguerre.data.images import headers
from daguerre.data.images.headers import Undecodable
from daguerre.types import MASK


@dataclass(frozen=True)
class Kind:
    """One kind."""

    channels: int
    """3: RGB; 1: grey, by luminance."""
    absent: int | None
    """Value of every pixel if a sample has none; None: such a sample is left out, and counted."""
    interpolation: str | None = None
    """Filter of the resize. None: `data.interpolation`."""
    under: str | None = None
    """Colour under transparent pixels, as #rrggbb. None: `data.alpha_colour`."""


KINDS: Mapping[str, Kind] = MappingProxyType({MASK: Kind(1, absent=255, interpolation="area", under="#000000")})
"""By name."""
_SUFFIXES: Mapping[str, str] = {**{f".{name}": name for name in KINDS}, "-masklabel": MASK}
"""Endings of their names in a folder; the last one is OneTrainer's."""


def owner(stem: str) -> tuple[str, str] | None:
    """(stem of the image, kind) for the name, without extension, of an image beside another one."""
    for suffix, name in _SUFFIXES.items():
        if stem.endswith(suffix) and os.path.basename(stem) != suffix:
            return stem.removesuffix(suffix), name
    return None


def lacking(name: str) -> str:
    """The reason for a sample without this image."""
    return f"no {name} beside the image" if KINDS[name].absent is None else f"kept without a {name}: all of it counts"


def check(name: str, encoded: bytes, size: tuple[int, int], formats: Sequence[str]) -> None:
    """`Undecodable` if an image's header is broken, or its shape is not that of an image of this (height, width)."""
    with named(name):
        check_shape(headers.upright_size(io.BytesIO(encoded), formats), size)


def check_shape(own: tuple[int, int], size: tuple[int, int]) -> None:
    """`Undecodable` if an image of this (height, width) is not `size` at another scale, within a pixel."""
    if abs(own[0] * size[1] - own[1] * size[0]) > max(size):
        raise Undecodable("another aspect ratio than its image's")


@contextmanager
def named(name: str) -> Iterator[None]:
    """A block whose `Undecodable` names the image."""
    try:
        yield
    except Undecodable as error:
        raise Undecodable(f"{name}: {error}") from error
