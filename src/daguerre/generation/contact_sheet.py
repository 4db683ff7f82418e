"""The contact sheet of generated images: one HTML page with small copies, prompts and seeds; text is escaped."""

import io
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from daguerre.checkpoint.atomic import write_bytes_atomically
from daguerre.formatting import counted
from daguerre.report.html import Html, data_address, element, is_small, join, render_page

NAME = "contact-sheet.html"
MOST = 240
"""Most images on a page."""
_SIDE_PX = 320
_EMPTY = "(empty prompt)"
_Cell = tuple[Html, str]
"""A figure and its CSS."""


@dataclass(frozen=True)
class Example:
    """An image of the sheet."""

    image: bytes
    """Its encoded file."""
    prompt: str
    seed: int
    size_px: tuple[int, int]
    """Height and width."""
    name: str
    link: str | None
    """Its file relative to the page, if it has one of its own."""


def write(folder: Path, examples: Iterable[Example], total: int, provenance: str) -> Path:
    """Writes the page into the folder of the images; returns its path."""
    path = folder / NAME
    write_bytes_atomically(path, page(folder.resolve().name, examples, total, provenance).encode())
    return path


def page(title: str, examples: Iterable[Example], total: int, provenance: str) -> str:
    """The page. Consecutive images with one prompt stand below it together."""
    groups = [
        (prompt, [_cell(example) for example in alike])
        for prompt, alike in groupby(examples, lambda example: example.prompt)
    ]
    shown = sum(len(cells) for _, cells in groups)
    count = counted(total, "image")
    note = count if shown == total else f"{shown:,} of {count}, evenly spread"
    header = join(
        element("p", "Daguerre · contact sheet", class_="kicker"),
        element("h1", title),
        element("p", note, class_="summary"),
        element("p", provenance, class_="note"),
    )
    body = join(*(_group(prompt, cells) for prompt, cells in groups))
    if all(len(cells) == 1 for _, cells in groups):
        captioned = (
            element("div", figure, element("p", prompt or _EMPTY, class_="prompt"), class_="cell", style=style)
            for prompt, ((figure, style),) in groups
        )
        body = element("div", *captioned, class_="sheet")
    return render_page(f"{title} · Daguerre", header, body, "the images next to it", ("style.css", "contact.css"))


def _group(prompt: str, cells: list[_Cell]) -> Html:
    sheet = (element("div", figure, class_="cell", style=style) for figure, style in cells)
    title = element("p", prompt or _EMPTY, class_="prompt")
    return element("section", title, element("div", *sheet, class_="sheet"), class_="prompt-group")


def _cell(example: Example) -> _Cell:
    """The image with its note, as wide as its shape wants at the height of a row."""
    height, width = example.size_px
    with Image.open(io.BytesIO(example.image)) as opened:
        image = opened.convert("RGB")
    small = is_small(image)  # shown with hard edges
    image.thumbnail((_SIDE_PX, _SIDE_PX), Image.Resampling.LANCZOS)
    address = data_address(image, small, quality=82)
    alt = f"{example.prompt}, seed {example.seed}"
    content = element("img", src=address, alt=alt, title=example.name, class_="pixels" if small else None)
    if example.link is not None:
        content = element("a", content, href="./" + quote(example.link))
    figure = element("figure", content, element("figcaption", f"seed {example.seed} · {width} × {height}"))
    return figure, f"--ratio: {width / height:.3f}"
