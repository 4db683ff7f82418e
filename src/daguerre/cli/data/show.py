"""`daguerre data show`: a contact sheet of what the network will see, with its captions."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from pydantic import Field

from daguerre import errors
from daguerre.cli.data import samples
from daguerre.cli.data.opened import opened
from daguerre.cli.data.samples import Lost
from daguerre.config import options
from daguerre.config.options import Request
from daguerre.data import skipped
from daguerre.data.images.headers import Undecodable
from daguerre.errors import UserError
from daguerre.settings import ADDRESS, Settings

SUMMARY = "a picture of what the network will see, with its captions"
HELP = """\
usage: daguerre data show DATA [-o sheet.png] [count=24] [key=value ...]

Draws samples at random and shows each as training has it in its first epoch: decoded, resized to its bucket, flipped
and cropped, with the caption that is drawn for it (none is dropped here); a mask stands on its right. The same command
shows the same samples.

  daguerre data show my_pictures
  daguerre data show my_pictures data.resolution=256 data.crop=random data.buckets.aspects=auto
  daguerre data show quickstart -o shapes.png count=40

  -o FILE or out=FILE   .png, .jpg or .webp (data-show.png)
  count=N               how many (24)
  seed=N                which are drawn, and how they are cropped (0, or the recipe's)
  data.KEY=VALUE        settings of the data, as in training
"""

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_SHEET_PX = 1600
_GAP_PX = 16
_ROW_PX = 240
_TEXT_PX = 15
_LINE_PX = 20
_LINES = 4
_LETTERS = 4000
"""Of a caption that are looked at: more than fit into the lines of the widest cell."""
_ABOVE_TEXT_PX = 6
_PAPER, _INK, _SOFT, _EDGE = "#faf9f6", "#1f2328", "#6b6f76", "#d8d4ca"


class Options(Settings):
    """What `show` takes beside the data."""

    out: Annotated[str, ADDRESS] = Field("data-show.png", min_length=1)
    """File that is written."""
    count: int = Field(24, ge=1, le=400)
    """How many samples are shown."""


@dataclass(frozen=True)
class Cell:
    """One sample on the sheet."""

    picture: Image.Image
    """As the network sees it; images beside it, such as its mask, on its right."""
    caption: str
    note: str


def run(arguments: list[str]) -> int:
    """Exit code 0; UserError where nothing can be shown."""
    request = options.read(arguments, Options)
    path = Path(request.options.out).expanduser()
    if path.suffix.lower() not in _SUFFIXES:
        raise UserError(f"out={path}: the sheet is a picture; give a name that ends in {', '.join(_SUFFIXES)}")
    for notice in request.notices:
        print(notice)
    lost: skipped.Counts = {}
    cells = _cells(request, lost)
    if lost:
        print(f"not shown:\n{skipped.table(lost)}")
    if not cells:
        raise UserError(
            "no sample can be shown: none that was drawn can be used, or no bucket takes any. `daguerre data stats` "
            "says what is left out and why"
        )
    sheet(cells).save(path)
    print(path)
    return errors.DONE


def _cells(request: Request[Options], lost: skipped.Counts) -> list[Cell]:
    """The samples, drawn from each source of a mix alike."""
    cells: list[Cell] = []
    named = request.settings.sources
    for i, settings in enumerate(named.values()):
        share = request.options.count * (i + 1) // len(named) - request.options.count * i // len(named)
        data = opened(settings)
        numbers = samples.usable(data).drawn(share, request.seed, "show")
        for found in samples.seen(data, numbers, request.seed):
            if isinstance(found, Lost):
                skipped.add(lost, found.reason, found.name)
                continue
            try:
                if found.caption is None:
                    raise Undecodable("no caption in the caption fields")
                frame, cut = samples.framed(found, settings, request.seed)
            except Undecodable as error:
                skipped.add(lost, str(error), found.record.key)
                continue
            side_by_side = torch.cat([pixels_CHW.expand(3, -1, -1) for pixels_CHW in cut.values()], dim=2)
            pixels = np.ascontiguousarray(side_by_side.permute(1, 2, 0).numpy())
            cells.append(Cell(Image.fromarray(pixels), found.caption, _note(frame.sizes)))
    return cells


def _note(sizes: np.ndarray) -> str:
    height, width, _, _, tall, wide = sizes.tolist()
    return f"{width} x {height}" + ("" if (height, width) == (tall, wide) else f" -> {wide} x {tall}")


def sheet(cells: list[Cell]) -> Image.Image:
    """All cells in rows of one height, captions below."""
    rows = _rows(cells)
    words_px = [_words_px(row, height) for row, height in rows]
    deep = _GAP_PX + sum(height + words + _GAP_PX for (_, height), words in zip(rows, words_px, strict=True))
    whole = Image.new("RGB", (_SHEET_PX, deep), _PAPER)
    pen = ImageDraw.Draw(whole)
    top = _GAP_PX
    for (row, height), words in zip(rows, words_px, strict=True):
        left = _GAP_PX
        for cell in row:
            width = _width(cell, height)
            pen.rectangle((left - 1, top - 1, left + width, top + height), outline=_EDGE)
            whole.paste(_scaled(cell.picture, width, height), (left, top))
            _write(pen, cell, left, top + height + _ABOVE_TEXT_PX, width)
            left += width + _GAP_PX
        top += height + words + _GAP_PX
    return whole


def _rows(cells: list[Cell]) -> list[tuple[list[Cell], int]]:
    """Cells in their order, as many in a row as fit at about `_ROW_PX`; rows are then stretched to the full width."""
    rows: list[tuple[list[Cell], int]] = []
    row: list[Cell] = []
    for cell in cells:
        row.append(cell)
        height = _height(row)
        if height <= _ROW_PX:
            rows.append((row, height))
            row = []
    if row:
        usual = rows[-1][1] if rows else _ROW_PX
        rows.append((row, min(usual, _height(row))))
    return rows


def _height(row: list[Cell]) -> int:
    """How tall a row is that is as wide as the sheet."""
    room = _SHEET_PX - _GAP_PX * (len(row) + 1)
    return int(room / sum(cell.picture.width / cell.picture.height for cell in row))


def _width(cell: Cell, height: int) -> int:
    return max(1, int(height * cell.picture.width / cell.picture.height))


def _scaled(picture: Image.Image, width: int, height: int) -> Image.Image:
    """Small pictures are enlarged with hard edges, so that their pixels can be seen."""
    way = Image.Resampling.NEAREST if picture.width * 2 <= width else Image.Resampling.LANCZOS
    return picture.resize((width, height), way)


def _words_px(row: list[Cell], height: int) -> int:
    """Room for the longest caption of a row, and the note below it."""
    font = ImageFont.load_default(_TEXT_PX)
    lines = max(len(wrapped(cell.caption, _width(cell, height), font)) for cell in row)
    return _ABOVE_TEXT_PX + _LINE_PX * (lines + 1)


def _write(pen: ImageDraw.ImageDraw, cell: Cell, left: int, top: int, width: int) -> None:
    """The caption in at most `_LINES` lines of the picture's width, then the note."""
    font, small = ImageFont.load_default(_TEXT_PX), ImageFont.load_default(_TEXT_PX - 3)
    for line in wrapped(cell.caption, width, font):
        pen.text((left, top), line, _INK, font)
        top += _LINE_PX
    pen.text((left, top + 2), cell.note, _SOFT, small)


def wrapped(text: str, width_px: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    """Text in lines that are not wider than `width_px`; what does not fit ends in three dots."""
    lines: list[str] = []
    rest = " ".join(text[:_LETTERS].split())
    while rest and len(lines) < _LINES:
        cut = _fitting(rest, width_px, font)
        last = len(lines) == _LINES - 1 and cut < len(rest)
        line = rest[:cut].rstrip()
        lines.append(line[:-3].rstrip() + "..." if last else line)
        rest = rest[cut:].lstrip()
    return lines


def _fitting(text: str, width_px: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> int:
    """How many characters fit into a line, at least one: up to the last space, or within a word that is too long."""
    if font.getlength(text) <= width_px:
        return len(text)
    cut = bisect_left(range(1, len(text)), True, key=lambda letters: font.getlength(text[:letters]) > width_px)
    space = text.rfind(" ", 0, cut + 1)
    return space if space > 0 else max(1, cut)
