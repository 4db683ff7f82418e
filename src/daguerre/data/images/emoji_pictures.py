"""Pictures of emoji: drawn by a colour font, or files of a folder that are named by code points."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features

from daguerre.errors import UserError

_SIZES = (109, 160, 96, 64)
"""Sizes that fonts of bitmaps have: Noto's one, then Apple's; others have any."""
_MEASURE = "\U0001f600"  # a face: as wide as an emoji is
_UNASSIGNED = "\U0010ffff"  # no font has it, so it shows what stands for a missing one
_ONE_PICTURE = 1.5
"""Widths of an emoji from which on a sequence was drawn as several."""
_SUFFIXES = (".png", ".webp")
_VARIATION = "fe0f"


class Pictures(ABC):
    """Emoji by their text."""

    side_px: int
    blank: str
    """Why an emoji is left out that comes out as one of `missing`."""
    missing: tuple[bytes, ...]
    none: str
    """What is wrong where no emoji is drawn, and what to do."""

    @abstractmethod
    def glyph(self, text: str) -> Image.Image:
        """The picture of an emoji, RGBA; of no pixels where it is empty."""

    @abstractmethod
    def fault(self, text: str) -> str | None:
        """The reason to leave an emoji out; None where `glyph` may draw it."""

    def on(self, text: str, colour: str) -> np.ndarray:
        """The emoji in the middle of a square of a colour, (side, side, 3) uint8."""
        glyph = self.glyph(text)
        side = max(self.side_px, *glyph.size)
        square = Image.new("RGBA", (side, side), colour)
        square.alpha_composite(glyph, ((side - glyph.width) // 2, (side - glyph.height) // 2))
        return np.asarray(square.convert("RGB"))


class Font(Pictures):
    """A colour font at a size that it has."""

    blank = "not in this font, or not of a kind that Pillow draws"
    none = (
        "no emoji of this font is drawn; all come out empty, or look the same. Pillow draws fonts of bitmaps (CBDT, as "
        "Debian's Noto Color Emoji; sbix, as Apple's) and of flat layers (COLR version 0), not of gradients (COLR "
        "version 1) or SVG. Name another one, data.font=FILE"
    )

    def __init__(self, font: ImageFont.FreeTypeFont) -> None:
        self.font = font
        self.advance_px = float(self.font.getlength(_MEASURE))
        left, top, right, bottom = self.font.getbbox(_MEASURE)
        self.side_px = round(max(right - left, bottom - top))
        self.missing = (self.glyph(_UNASSIGNED).tobytes(), b"")
        self.joins = bool(features.check("raqm") and features.check("fribidi"))

    def glyph(self, text: str) -> Image.Image:
        """As the font draws it, cut to what it covers."""
        left, top, right, bottom = map(int, self.font.getbbox(text))
        canvas = Image.new("RGBA", (max(right - left, 1), max(bottom - top, 1)))
        ImageDraw.Draw(canvas).text((-left, -top), text, font=self.font, embedded_color=True)
        return canvas if canvas.getbbox() else Image.new("RGBA", (0, 0))

    def fault(self, text: str) -> str | None:
        if len(text) > 1 and not self.joins:
            return "sequences, which FriBiDi joins (apt install libfribidi0)"
        if self.font.getlength(text) > _ONE_PICTURE * self.advance_px:
            return "sequences that this font has not as one picture"
        return None


class Folder(Pictures):
    """Files of a folder such as `1f44b-1f3fd.png`, as publishers of emoji name them."""

    blank = "empty pictures"
    missing = (b"",)
    none = (
        "no picture of this folder is named by the code points of an emoji: Noto, Twemoji and Google have files such "
        "as 1f600.png or emoji_u1f600.png. Name the folder that holds them, data.font=FOLDER"
    )

    def __init__(self, folder: Path) -> None:
        self.files = {code: path for path in sorted(folder.iterdir()) if (code := _code(path)) is not None}
        self.side_px = max((_side_px(path) for path in self.files.values()), default=1)

    def glyph(self, text: str) -> Image.Image:
        with _opened(self.files[_plain(text)]) as file:
            picture = file.convert("RGBA")
        return picture if picture.getbbox() else Image.new("RGBA", (0, 0))

    def fault(self, text: str) -> str | None:
        return None if _plain(text) in self.files else "no file in this folder"


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as file:
            yield file
    except OSError as error:
        raise UserError(
            f"{path} is not a picture that can be opened: {error}. Remove or replace it",
            code="damaged",
            setting="data.font",
        ) from error


def _side_px(path: Path) -> int:
    with _opened(path) as file:
        return max(file.size)


def _code(path: Path) -> str | None:
    """The code points that a file's name says, in lower case, joined by `-`; None for another file."""
    points = path.stem.lower().removeprefix("emoji_u").replace("_", "-").split("-")
    if path.suffix.lower() not in _SUFFIXES or not all(_is_point(point) for point in points):
        return None
    return "-".join(point.lstrip("0") for point in points if point != _VARIATION)


def _is_point(text: str) -> bool:
    return 2 <= len(text) <= 6 and all(digit in "0123456789abcdef" for digit in text)


def _plain(text: str) -> str:
    """As `_code`: some publishers leave the mark of a coloured picture out, others write it."""
    return "-".join(point for point in (f"{ord(each):x}" for each in text) if point != _VARIATION)


@functools.lru_cache(maxsize=4)
def open_pictures(place: Path) -> Pictures:
    """A font or a folder, opened once a process. Threads may share it: Pillow draws while it holds the interpreter's
    lock, and each opens files for itself. UserError for one that cannot be opened."""
    if place.is_dir():
        return Folder(place)
    for size in _SIZES:
        try:
            return Font(ImageFont.truetype(str(place), size))
        except OSError as error:
            why = error  # of a font of bitmaps that has not this size, or of a file of another kind
    raise UserError(f"{place} is not a font that can be opened: {why}", code="damaged", setting="data.font")


def digest(place: Path) -> bytes:
    """Of all that decides the pictures: a font's file, or the names and contents of a folder's."""
    if not place.is_dir():
        return blake2b(place.read_bytes(), digest_size=16).digest()
    pictures = open_pictures(place)
    assert isinstance(pictures, Folder)
    whole = blake2b(digest_size=16)
    for code, path in sorted(pictures.files.items()):
        whole.update(f"{code} ".encode() + blake2b(path.read_bytes(), digest_size=16).digest())
    return whole.digest()
