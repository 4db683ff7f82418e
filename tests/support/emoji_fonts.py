"""Small colour fonts with a few emoji, made by fontTools: flat layers, which Pillow draws at any size."""

from pathlib import Path

from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen

EM = 1000
COLOURS = [(1.0, 0.8, 0.1, 1.0), (0.9, 0.1, 0.1, 1.0), (0.1, 0.4, 0.9, 1.0), (0.3, 0.7, 0.3, 1.0)]
HAND, TONES = 0x1F44B, range(0x1F3FB, 0x1F400)
POINTS = [*range(0x1F600, 0x1F60C), 0x1F7E1, 0x1F534, 0x1F34E, HAND]
"""Twelve faces, a yellow circle (which is held out), a red one, an apple and a waving hand."""


def _square(size: int, at: int = 0):
    pen = TTGlyphPen(None)
    corners = [(at, at), (at, at + size), (at + size, at + size), (at + size, at)]
    if size:
        pen.moveTo(corners[0])
        for corner in corners[1:]:
            pen.lineTo(corner)
        pen.closePath()
    return pen.glyph()


def colour_font(path: Path, blank: bool = False, tones: bool = True) -> Path:
    """A font that draws `POINTS`, each a square with another one on it, and the hand in five tones as a ligature;
    `blank`: all its glyphs are empty."""
    names = {point: f"u{point:X}" for point in [*POINTS, *TONES]}
    toned = [f"hand{i}" for i in range(len(TONES))] if tones else []
    drawn = [*(names[point] for point in POINTS), *toned]
    layers = {f"{name}.{layer}": None for name in drawn for layer in "ab"}
    glyphs = {".notdef": _square(300), **{name: _square(0 if blank else EM) for name in [*names.values(), *toned]}}
    for i, name in enumerate(drawn):
        glyphs[f"{name}.a"] = _square(0 if blank else EM)
        glyphs[f"{name}.b"] = _square(0 if blank else 100 + 40 * i, at=10)
    font = FontBuilder(EM, isTTF=True)
    font.setupGlyphOrder([".notdef", *names.values(), *toned, *layers])
    font.setupCharacterMap(dict(names))
    font.setupGlyf(glyphs)
    font.setupHorizontalMetrics(dict.fromkeys(glyphs, (EM, 0)))
    font.setupHorizontalHeader(ascent=EM, descent=0)
    font.setupNameTable({"familyName": "Few Emoji", "styleName": "Regular"})
    font.setupOS2(sTypoAscender=EM, usWinAscent=EM)
    font.setupPost()
    font.setupCPAL([COLOURS])
    font.setupCOLR(
        {name: [(f"{name}.a", i % 4), (f"{name}.b", (i + 1 + i // 4) % 4)] for i, name in enumerate(drawn)}, version=0
    )
    if toned:
        rules = "".join(f"sub {names[HAND]} {names[tone]} by {own};" for tone, own in zip(TONES, toned, strict=True))
        font.addOpenTypeFeatures(f"feature ccmp {{ {rules} }} ccmp;")
    font.save(path)
    return path
