"""An image of samples as the network will see them, with captions.

usage: daguerre data show DATA [-o sheet.png] [count=24] [key=value ...]

Takes samples at random and shows each as training has it in its first epoch: decoded, resized to its bucket, flipped
and cropped, with the caption that is chosen for it (none is dropped here). Its mask and control images stand on its
right; a checkerboard stands for what is unknown in them. The same command shows the same samples.

  daguerre data show my_images
  daguerre data show my_images data.resolution=256 data.crop=random data.buckets.aspects=auto
  daguerre data show quickstart -o shapes.png count=40
  daguerre data show my_images condition=canny condition.low=50

  -o FILE or out=FILE   .png, .jpg or .webp (data-show.png)
  count=N               how many (24)
  condition=NAME        computes the control image of each sample, as adapters do (docs/conditions.md)
  condition.KEY=VALUE   settings of the condition
  seed=N                chooses samples and crops (0, or the recipe's)
  data.KEY=VALUE        settings of the data, as in training
"""

import io
import textwrap
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from pydantic import Field

from daguerre import errors
from daguerre.checkpoint.atomic import write_bytes_atomically
from daguerre.cli.data import fonts, samples
from daguerre.cli.data.fonts import Font
from daguerre.cli.data.opened import opened
from daguerre.cli.data.samples import Lost
from daguerre.cli.parts import out_file
from daguerre.conditions.condition import OptionalCondition
from daguerre.config import options
from daguerre.config.options import Request
from daguerre.data import skipped
from daguerre.data.images.headers import Undecodable
from daguerre.errors import UserError
from daguerre.settings import ADDRESS, Settings
from daguerre.types import CONTROLS, IMAGE

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_SHEET_PX = 1600
_CHECK_PX = 8
"""Squares of the board that stands for unknown parts of a control image."""
_GAP_PX = 16
_ROW_PX = 240
_TEXT_PX = 15
_LINE_PX = 20
_LINES = 4
_LETTERS = 4000
"""Of a caption that are looked at: more than fit into the lines of the widest cell."""
_FEWEST_LETTERS = 4
_ABOVE_TEXT_PX = 6
_PAPER, _INK, _SOFT, _EDGE = "#faf9f6", "#1f2328", "#6b6f76", "#d8d4ca"


class Options(Settings):
    """Options of `show`, as the help has them."""

    out: Annotated[str, ADDRESS] = Field("data-show.png", min_length=1)
    count: int = Field(24, ge=1, le=400)
    condition: OptionalCondition = None


@dataclass(frozen=True)
class Cell:
    """One sample on the sheet."""

    image: Image.Image
    """As the network sees it, with its mask or other images on its right."""
    caption: str
    note: str


def run(arguments: list[str]) -> int:
    """Exit code 0; UserError where nothing can be shown."""
    request = options.read(arguments, Options)
    path = out_file.place(request.options.out)
    if path.suffix.lower() not in _SUFFIXES:
        what = f"out={path}: the output is an image; its name must end in {', '.join(_SUFFIXES)}"
        raise UserError(what, setting="out")
    for notice in request.notices:
        print(notice)
    lost: skipped.Counts = {}
    cells = _cells(request, lost)
    if lost:
        print(f"not shown:\n{skipped.table(lost)}")
    if not cells:
        raise UserError(
            "no sample can be shown: none of the chosen samples can be used, or none fits a bucket. `daguerre data "
            "stats` shows what is left out and why",
            code="empty",
        )
    content = io.BytesIO()
    sheet(cells).save(content, Image.registered_extensions()[path.suffix.lower()])
    write_bytes_atomically(path, content.getvalue())
    print(path)
    return errors.DONE


def _cells(request: Request[Options], lost: skipped.Counts) -> list[Cell]:
    """Random samples, equally many of each source of a mix."""
    cells: list[Cell] = []
    named, condition = request.settings.sources, request.options.condition
    computed = {} if condition is None else {CONTROLS[0]: condition}
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
                frame, cut = samples.framed(found, settings, request.seed, computed)
            except Undecodable as error:
                skipped.add(lost, str(error), found.record.key)
                continue
            height = cut[IMAGE].shape[1]
            side_by_side = torch.cat([_shown(pixels_CHW, height) for pixels_CHW in cut.values()], dim=2)
            pixels = np.ascontiguousarray(side_by_side.permute(1, 2, 0).numpy())
            cells.append(Cell(Image.fromarray(pixels), found.caption, _note(frame.sizes)))
    return cells


def _shown(pixels_CHW: torch.Tensor, height: int) -> torch.Tensor:
    """[3, height, W] uint8 of grey, RGB, or RGBA, in which a checkerboard stands for what is unknown; a reference image
    has another height, and is resized to this one."""
    if pixels_CHW.shape[1] != height:
        image = Image.fromarray(np.ascontiguousarray(pixels_CHW.permute(1, 2, 0).numpy()))
        resized = image.resize((max(1, image.width * height // image.height), height), Image.Resampling.LANCZOS)
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1)
    if len(pixels_CHW) < 4:
        return pixels_CHW.expand(3, -1, -1)
    down_H, right_W = (torch.arange(side) // _CHECK_PX for side in pixels_CHW.shape[1:])
    board_HW = 160 + 60 * ((down_H[:, None] + right_W) % 2).to(torch.uint8)
    return torch.where(pixels_CHW[3:] < 128, board_HW, pixels_CHW[:3])


def _note(sizes: np.ndarray) -> str:
    height, width, _, _, tall, wide = sizes.tolist()
    return f"{width} x {height}" + ("" if (height, width) == (tall, wide) else f" -> {wide} x {tall}")


def sheet(cells: list[Cell]) -> Image.Image:
    """All cells in rows of one height, captions below."""
    found = [fonts.best(cell.caption[:_LETTERS], _TEXT_PX) for cell in cells]
    if lacking := "".join(sorted({letter for _, letters in found for letter in letters})):
        print(
            f"no font of this machine has {len(lacking)} of the characters of these captions, such as {lacking[:5]}: "
            "they are drawn as boxes (Debian and Ubuntu: apt install fonts-noto-cjk for Chinese, Japanese and Korean, "
            "fonts-noto-core for other scripts). Training reads them as they are"
        )
    font_of = {id(cell): font for cell, (font, _) in zip(cells, found, strict=True)}
    small = ImageFont.load_default(_TEXT_PX - 3)
    rows = []
    for row, height in _rows(cells):
        captions = [_wrapped(cell.caption, _width(cell, height), font_of[id(cell)]) for cell in row]
        rows.append((row, height, captions, _ABOVE_TEXT_PX + _LINE_PX * (max(map(len, captions)) + 1)))
    deep = _GAP_PX + sum(height + words + _GAP_PX for _, height, _, words in rows)
    image = Image.new("RGB", (_SHEET_PX, deep), _PAPER)
    pen = ImageDraw.Draw(image)
    top = _GAP_PX
    for row, height, captions, words in rows:
        left = _GAP_PX
        for cell, lines in zip(row, captions, strict=True):
            width = _width(cell, height)
            pen.rectangle((left - 1, top - 1, left + width, top + height), outline=_EDGE)
            enlarged = cell.image.width * 2 <= width  # with hard edges, so that pixels can be seen
            filtered = Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS
            image.paste(cell.image.resize((width, height), filtered), (left, top))
            below = top + height + _ABOVE_TEXT_PX
            for i, line in enumerate(lines):
                pen.text((left, below + i * _LINE_PX), line, _INK, font_of[id(cell)])
            pen.text((left, below + len(lines) * _LINE_PX + 2), cell.note, _SOFT, small)
            left += width + _GAP_PX
        top += height + words + _GAP_PX
    return image


def _rows(cells: list[Cell]) -> list[tuple[list[Cell], int]]:
    """Cells in their order with the heights of their rows: as many in a row as fit at about `_ROW_PX`, then stretched
    to the full width."""
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
    """The height of a row that is as wide as the sheet."""
    room = _SHEET_PX - _GAP_PX * (len(row) + 1)
    return int(room / sum(cell.image.width / cell.image.height for cell in row))


def _width(cell: Cell, height: int) -> int:
    return max(1, int(height * cell.image.width / cell.image.height))


def _wrapped(text: str, width_px: int, font: Font) -> list[str]:
    """Text in at most `_LINES` lines no wider than `width_px`; three dots stand for what does not fit."""
    text, lines = " ".join(text[:_LETTERS].split()), []
    for letters in range(max(width_px // 3, _FEWEST_LETTERS), _FEWEST_LETTERS - 1, -1):
        start = text[: letters * (_LINES + 1)]
        lines = textwrap.wrap(start, letters, max_lines=_LINES, placeholder="...", break_on_hyphens=False)
        if all(font.getlength(line) <= width_px for line in lines):
            break
    return lines
