"""Fonts of a contact sheet's captions: of each the one of this machine that has the most of its characters."""

from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
PLACES = (
    "/usr/share/fonts/opentype/noto/NotoSansCJK-Regular.ttc",
    "/usr/share/fonts/noto-cjk/NotoSansCJK-Regular.ttc",
    "/usr/share/fonts/google-noto-sans-cjk-vf-fonts/NotoSansCJK-VF.ttc",
    "/usr/share/fonts/truetype/wqy/wqy-microhei.ttc",
    "/usr/share/fonts/truetype/droid/DroidSansFallbackFull.ttf",
    "/usr/share/fonts/truetype/noto/NotoSans-Regular.ttf",
    "/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf",
    "/usr/share/fonts/TTF/DejaVuSans.ttf",
    "/System/Library/Fonts/Supplemental/Arial Unicode.ttf",
    "/mnt/c/Windows/Fonts/msyh.ttc",
    "/mnt/c/Windows/Fonts/arial.ttf",
)
"""Known places of fonts with many scripts, on Linux, macOS and Windows under WSL."""
SCRIPTS = ("/usr/share/fonts/truetype/noto", "/usr/share/fonts/noto")
"""Folders with a font for each of many scripts, such as Devanagari and Thai: fonts-noto-core of Debian, noto-fonts."""
_MISSING = "\uffff"
"""No character: every font draws its box for it."""


def best(text: str, size_px: int) -> tuple[Font, str]:
    """The font that draws a text, Pillow's own where that has all of its characters, and the characters that it lacks
    too."""
    wanted = {letter for letter in text if letter.isprintable() and not letter.isspace()}
    chosen: Font = ImageFont.load_default(size_px)
    lacking = _lacking(chosen, wanted)
    for place in (*PLACES, *_of_scripts(SCRIPTS)):
        if not lacking:
            break
        if (font := _at(place, size_px)) is not None and len(without := _lacking(font, wanted)) < len(lacking):
            chosen, lacking = font, without
    return chosen, "".join(sorted(lacking))


@lru_cache(maxsize=1)
def _of_scripts(folders: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(path) for folder in folders for path in sorted(Path(folder).glob("NotoSans*-Regular.ttf")))


@lru_cache(maxsize=32)
def _at(place: str, size_px: int) -> Font | None:
    try:
        return ImageFont.truetype(place, size_px) if Path(place).is_file() else None
    except OSError:  # a font that this Pillow cannot read
        return None


def _lacking(font: Font, letters: set[str]) -> set[str]:
    """The characters for which a font has the same box as for none."""
    box = _drawn(font, _MISSING)
    return {letter for letter in letters if _drawn(font, letter) == box}


def _drawn(font: Font, letter: str) -> tuple[tuple[int, int], bytes]:
    mask = font.getmask(letter)
    return tuple(mask.size), bytes(mask)
