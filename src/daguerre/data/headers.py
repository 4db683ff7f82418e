"""What is let in as an image file: the formats and the size, read from the header before any pixel is decoded.

No torch here, so that a source can look at its files while a recipe is checked. Decoding is `decode.py`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import BinaryIO

from PIL import Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

PIXEL_LIMIT = 2**27
"""Largest picture that is decoded, in pixels (134 million; 400 MB as RGB): a small file can claim any size."""

BROKEN: tuple[type[Exception], ...] = (OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError)
BROKEN += (ArithmeticError, AttributeError, RuntimeError, struct.error, zlib.error)
"""What Pillow raises for damaged files; a broken animated PNG is a SyntaxError. For bytes in memory OSError is no
fault of a disk."""


class Undecodable(Exception):
    """The picture cannot be used, now or later. The text is the reason, the same for every file with that fault."""


def opened(file: BinaryIO) -> Image.Image:
    """A JPEG, PNG or WebP file whose header was read and whose size is allowed; no pixel yet.

    Not by `Image.open`: it tries formats by its own list, and has a size limit of its own. Raises `Undecodable`,
    and OSError as it is where the disk is at fault: that may pass, so it is no reason to leave a picture out.
    """
    start = file.read(12)
    file.seek(0)
    try:
        image = _plugin(start)(file)
    except BROKEN as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's; Pillow's own have no number
            raise
        raise Undecodable("broken image") from error
    if image.width * image.height > PIXEL_LIMIT:
        raise Undecodable(f"too many pixels (limit {PIXEL_LIMIT})")
    return image


def _plugin(start: bytes) -> Callable[[BinaryIO], Image.Image]:
    if not start:
        raise Undecodable("empty file")
    if start.startswith(b"\xff\xd8\xff"):
        return JpegImagePlugin.JpegImageFile
    if start.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImagePlugin.PngImageFile
    if start.startswith(b"RIFF") and start[8:12] == b"WEBP":
        return WebPImagePlugin.WebPImageFile
    raise Undecodable("not an image (JPEG, PNG and WebP can be read)")
