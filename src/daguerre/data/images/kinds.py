"""Images that a sample may have beside the one that is trained on: which there are, and how each is read.

A source puts them into `Record.images` under these names. They are cut exactly as the picture itself (`decode.Frame`).
No torch here.
"""

from __future__ import annotations

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
    """How one kind of them is read."""

    channels: int
    """3: RGB; 1: grey, by luminance."""
    absent: int | None
    """Value of every pixel where a sample has none; None: such a sample is left out, and counted."""
    interpolation: str | None = None
    """Filter of the resize. None: that of the picture, `data.interpolation`."""
    under: str | None = None
    """Colour under transparent pixels, as #rrggbb. None: `data.alpha_colour`."""


KINDS: Mapping[str, Kind] = MappingProxyType({MASK: Kind(1, absent=255, interpolation="area", under="#000000")})
"""By name."""
_SUFFIXES: Mapping[str, str] = {**{f".{name}": name for name in KINDS}, "-masklabel": MASK}
"""What follows the picture's name in a folder; the last one is OneTrainer's."""


def owner(stem: str) -> tuple[str, str] | None:
    """(stem of the picture, kind) of a file that is called as an image beside another one; `stem` has no extension."""
    for suffix, name in _SUFFIXES.items():
        if stem.endswith(suffix) and os.path.basename(stem) != suffix:
            return stem.removesuffix(suffix), name
    return None


def lacking(name: str) -> str:
    """The reason under which a sample without this image is counted."""
    return f"no {name} beside the picture" if KINDS[name].absent is None else f"kept without a {name}: all of it counts"


def check(name: str, encoded: bytes, size: tuple[int, int], formats: Sequence[str]) -> None:
    """`Undecodable` where an image's header is broken, or it is not of the shape of its picture, whose height and width
    are `size`."""
    with named(name):
        refuse_other_shape(headers.upright_size(io.BytesIO(encoded), formats), size)


def refuse_other_shape(own: tuple[int, int], size: tuple[int, int]) -> None:
    """`Undecodable` where an image of this height and width is no picture of `size` at another scale: where one of its
    sides is off by more than a pixel."""
    if abs(own[0] * size[1] - own[1] * size[0]) > max(size):
        raise Undecodable("another aspect ratio than its picture's")


@contextmanager
def named(name: str) -> Iterator[None]:
    """A block in which `Undecodable` says which image it is about."""
    try:
        yield
    except Undecodable as error:
        raise Undecodable(f"{name}: {error}") from error
