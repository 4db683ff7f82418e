"""Pictures inside a page: as data addresses, so that the page is one file. Knows nothing of runs."""

from __future__ import annotations

import base64
import io

from PIL import Image

SMALL_PX = 128
"""Longest side of pictures that are kept to the pixel and shown with hard edges."""


def is_small(picture: Image.Image) -> bool:
    """Whether a picture is kept to the pixel."""
    return max(picture.size) <= SMALL_PX


def data_address(picture: Image.Image, lossless: bool, quality: int) -> str:
    """A picture as PNG if `lossless`, else as WebP of this quality."""
    stream = io.BytesIO()
    if lossless:
        picture.save(stream, "PNG", optimize=True)
    else:
        picture.save(stream, "WEBP", quality=quality)
    kind = "png" if lossless else "webp"
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"
