"""The contact sheet of drawn pictures: one HTML page with small copies, their prompts and seeds; text is escaped."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from daguerre.checkpoint.atomic import write_bytes_atomically
from daguerre.report.html import Html, data_address, element, is_small, join, whole

NAME = "contact-sheet.html"
MOST = 240
"""Pictures on a page."""
_SIDE_PX = 320
_EMPTY = "(empty prompt)"


@dataclass(frozen=True)
class Example:
    """A picture of the sheet."""

    image: bytes
    """Its file."""
    prompt: str
    seed: int
    size_px: tuple[int, int]
    """Height and width."""
    name: str
    link: str | None
    """Its file relative to the page, where it has one of its own."""


def write(folder: Path, examples: Iterable[Example], total: int, made_with: str) -> Path:
    """Writes the page into the folder of the pictures; returns its path."""
    path = folder / NAME
    write_bytes_atomically(path, page(folder.resolve().name, examples, total, made_with).encode())
    return path


def page(title: str, examples: Iterable[Example], total: int, made_with: str) -> str:
    """The page. Pictures that follow each other with one prompt stand below it together."""
    groups: list[tuple[str, list[_Cell]]] = []
    shown = 0
    for example in examples:
        if not groups or groups[-1][0] != example.prompt:
            groups.append((example.prompt, []))
        groups[-1][1].append(_cell(example))
        shown += 1
    count = f"{total:,} picture{'s' * (total != 1)}"
    note = count if shown == total else f"{shown:,} of {count}, evenly spread"
    header = join(
        element("p", "Daguerre · contact sheet", class_="kicker"),
        element("h1", title),
        element("p", note, class_="summary"),
        element("p", made_with, class_="note"),
    )
    body = join(*(_group(prompt, cells) for prompt, cells in groups))
    if all(len(cells) == 1 for _, cells in groups):
        body = element("div", *(_captioned(prompt, cells[0]) for prompt, cells in groups), class_="sheet")
    return whole(f"{title} · Daguerre", header, body, "the pictures beside it", ("style.css", "contact.css"))


@dataclass(frozen=True)
class _Cell:
    """A picture with its note, as wide as its shape wants at the height of a row."""

    figure: Html
    style: str


def _captioned(prompt: str, cell: _Cell) -> Html:
    caption = element("p", prompt or _EMPTY, class_="prompt")
    return element("div", cell.figure, caption, class_="cell", style=cell.style)


def _group(prompt: str, cells: list[_Cell]) -> Html:
    return element(
        "section",
        element("p", prompt or _EMPTY, class_="prompt"),
        element("div", *(element("div", c.figure, class_="cell", style=c.style) for c in cells), class_="sheet"),
        class_="prompt-group",
    )


def _cell(example: Example) -> _Cell:
    height, width = example.size_px
    address, small = _embedded(example.image)
    alt = f"{example.prompt}, seed {example.seed}"
    picture = element("img", src=address, alt=alt, title=example.name, class_="pixels" if small else None)
    if example.link is not None:
        picture = element("a", picture, href=_address(example.link))
    figure = element("figure", picture, element("figcaption", f"seed {example.seed} · {width} × {height}"))
    return _Cell(figure, f"--ratio: {width / height:.3f}")


def _address(link: str) -> str:
    """A relative address; a name may hold what means something else in addresses."""
    return "./" + "".join(c if c.isalnum() or c in "-_./" else "".join(f"%{b:02X}" for b in c.encode()) for c in link)


def _embedded(file: bytes) -> tuple[str, bool]:
    """A data address of a small copy, and whether it is shown with hard edges."""
    with Image.open(io.BytesIO(file)) as opened:
        picture = opened.convert("RGB")
    small = is_small(picture)
    picture.thumbnail((_SIDE_PX, _SIDE_PX), Image.Resampling.LANCZOS)
    return data_address(picture, small, quality=82), small
