"""Formats and sizes of image files, read from the header before any pixel is decoded. No torch here, so that a source
can look at its files while a recipe is checked."""

import io
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import BinaryIO

import numpy as np
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

PIXEL_LIMIT = 2**27
"""Largest image that is decoded, in pixels (decoding it takes up to 2 GB): a small file can claim any size."""
USUAL = ("jpeg", "png", "webp")
"""Default formats."""

BROKEN: tuple[type[Exception], ...] = (OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError)
BROKEN += (ArithmeticError, AttributeError, RuntimeError, struct.error, zlib.error, Image.DecompressionBombError)
"""Pillow's errors for damaged files. For bytes in memory OSError is no fault of a disk."""

_TOO_LARGE = f"too many pixels (limit {PIXEL_LIMIT})"
_SPOKEN = {"jpeg": "JPEG", "png": "PNG", "webp": "WebP", "gif": "GIF", "bmp": "BMP", "tiff": "TIFF"}
_STARTS = (
    ("jpeg", b"\xff\xd8\xff"),
    ("png", b"\x89PNG\r\n\x1a\n"),
    ("gif", b"GIF87a"),
    ("gif", b"GIF89a"),
    ("bmp", b"BM"),
    *(("tiff", start) for start in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
)
_ORIENTATION = 274
_PNG_NOTES = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")


class Undecodable(Exception):
    """The sample can never be used. The text is the reason, the same for every file with that fault."""


def opened(file: BinaryIO, formats: Sequence[str]) -> Image.Image:
    """An image file of one of these `formats` whose header was read and whose size is allowed; no pixel yet.

    Not by `Image.open`, which has a list of formats and a size limit of its own. Raises `Undecodable`, and OSError if
    the disk is at fault, as that may pass.
    """
    start = file.read(12)
    file.seek(0)
    try:
        image = _plugin(start, formats)(file)
    except Image.DecompressionBombError as error:  # some plug-ins have a limit of their own, which is above ours
        raise Undecodable(_TOO_LARGE) from error
    except BROKEN as error:
        if _of_the_system(error):
            raise
        strange = "unknown pixel mode" in str(error)
        raise Undecodable("a TIFF with pixels of a kind that is not read" if strange else "broken image") from error
    if image.width * image.height > PIXEL_LIMIT:
        raise Undecodable(_TOO_LARGE)
    return image


def upright_size(file: BinaryIO, formats: Sequence[str]) -> tuple[int, int]:
    """Height and width after EXIF rotation. Raises as `opened`."""
    image = opened(file, formats)
    turned = orientation(image, to_the_end=image.format == "PNG" and _has_late_notes(file)) >= 5
    return (image.width, image.height) if turned else (image.height, image.width)


def is_transparent(image: bytes | np.ndarray, formats: Sequence[str]) -> bool:
    """True of a file whose header says that pixels can be transparent. Raises as `opened`."""
    return isinstance(image, bytes) and opened(io.BytesIO(image), formats).has_transparency_data


def has_frames(file: BinaryIO, formats: Sequence[str]) -> bool:
    """True of an animation, and of a TIFF of several pages. Raises as `opened`."""
    image = opened(file, formats)
    try:
        return bool(getattr(image, "is_animated", False))
    except BROKEN as error:
        if _of_the_system(error):
            raise
        return False  # the first picture may be whole


def orientation(image: Image.Image, to_the_end: bool = True) -> int:
    """EXIF's orientation, 1 to 8; 1 if it is missing or makes no sense. A PNG may hold it after its pixels:
    `to_the_end` decodes one that is not decoded yet."""
    if image.format == "TIFF":
        return 1  # Pillow turns these itself
    try:
        exif = image.getexif() if to_the_end else Image.Image.getexif(image)
        found = exif.get(_ORIENTATION, 1)
    except BROKEN as error:
        if _of_the_system(error):
            raise
        return 1  # the image itself is whole
    return found if found in range(1, 9) else 1


def _of_the_system(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno is not None  # Pillow's own have no number


def _plugin(start: bytes, formats: Sequence[str]) -> Callable[[BinaryIO], Image.Image]:
    if not start:
        raise Undecodable("empty file")
    kind = _kind(start)
    if kind is None:
        names = [_SPOKEN[name] for name in formats]
        read = f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else names[0]
        raise Undecodable(f"not an image ({read} can be read)")
    if kind not in formats:
        raise Undecodable(f"a {_SPOKEN[kind]} file, which data.formats does not allow ({', '.join(formats)})")
    # Looked up when they are called, and only for what is allowed: the less common decoders are the less tested ones.
    plugins: dict[str, Callable[[BinaryIO], Image.Image]] = {
        "jpeg": JpegImagePlugin.JpegImageFile,
        "png": PngImagePlugin.PngImageFile,
        "webp": WebPImagePlugin.WebPImageFile,
        "gif": GifImagePlugin.GifImageFile,
        "bmp": BmpImagePlugin.BmpImageFile,
        # From memory: of a file, Pillow takes a fault of the disk for damage.
        "tiff": lambda file: TiffImagePlugin.TiffImageFile(io.BytesIO(file.read())),
    }
    return plugins[kind]


def _kind(start: bytes) -> str | None:
    if start.startswith(b"RIFF") and start[8:12] == b"WEBP":
        return "webp"
    return next((kind for kind, magic in _STARTS if start.startswith(magic)), None)


def _has_late_notes(file: BinaryIO) -> bool:
    """True if a PNG has chunks after its pixels that may hold its orientation."""
    place = file.tell()
    file.seek(8)
    pixels = False
    try:
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            if kind == b"IEND" or (pixels and kind in _PNG_NOTES):
                return kind != b"IEND"
            pixels |= kind == b"IDAT"
            file.seek(length + 4, 1)
        return False
    finally:
        file.seek(place)
