"""The contact sheet of generated images: one HTML page with small copies, prompts and seeds, behind the images that the
requests gave; text is escaped."""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from daguerre.checkpoint.atomic import write_bytes_atomically
from daguerre.formatting import counted
from daguerre.generation.images import InputImage
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
    inputs: tuple[InputImage, ...] = ()
    """The images of its request."""


_Shown = tuple[str, tuple[InputImage, ...], _Cell]
"""Prompt and images of a request, and what was made of them."""


def write(folder: Path, examples: Iterable[Example], total: int, provenance: str) -> Path:
    """Writes the page into the folder of the images; returns its path."""
    path = folder / NAME
    write_bytes_atomically(path, page(folder.resolve().name, examples, total, provenance).encode())
    return path


def page(title: str, examples: Iterable[Example], total: int, provenance: str) -> str:
    """The page. Consecutive images with one prompt stand below it together. Images of requests stand before what was
    made of them, or at the top where all requests have the same."""
    shown: list[_Shown] = [(example.prompt, example.inputs, _cell(example)) for example in examples]
    given = {inputs for _, inputs, _ in shown}
    shared = given.pop() if len(given) == 1 else ()
    groups = [(prompt, [*_behind_inputs(alike, shared)]) for prompt, alike in groupby(shown, itemgetter(0))]
    count = counted(total, "image")
    note = count if len(shown) == total else f"{len(shown):,} of {count}, evenly spread"
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
    if shared:
        body = join(_group("given with every prompt", [_input(image) for image in shared]), body)
    return render_page(f"{title} · Daguerre", header, body, "the images next to it", ("style.css", "contact.css"))


def _group(prompt: str, cells: list[_Cell]) -> Html:
    sheet = (element("div", figure, class_="cell", style=style) for figure, style in cells)
    title = element("p", prompt or _EMPTY, class_="prompt")
    return element("section", title, element("div", *sheet, class_="sheet"), class_="prompt-group")


def _behind_inputs(alike: Iterable[_Shown], shared: tuple[InputImage, ...]) -> Iterator[_Cell]:
    """The cells of one prompt. Images of a request come once before the images that follow from the same."""
    last = shared
    for _, inputs, cell in alike:
        if inputs != last:
            yield from map(_input, inputs)
        yield cell
        last = inputs


def _cell(example: Example) -> _Cell:
    """A generated image with its note."""
    with Image.open(io.BytesIO(example.image)) as opened:
        image = opened.convert("RGB")
    note = f"seed {example.seed} · {example.size_px[1]} × {example.size_px[0]}"
    return _figure(image, example.size_px, f"{example.prompt}, seed {example.seed}", example.name, note, example.link)


def _input(image: InputImage) -> _Cell:
    """An image of a request, under its name there."""
    name = image.name.replace("_", " ")
    return _figure(Image.fromarray(image.upright()), image.size_px, name, image.path.name, name)


def _figure(
    image: Image.Image, size_px: tuple[int, int], alt: str, title: str, note: str, link: str | None = None
) -> _Cell:
    """An image with a note, as wide as its shape wants at the height of a row."""
    small = is_small(image)  # shown with hard edges
    image.thumbnail((_SIDE_PX, _SIDE_PX), Image.Resampling.LANCZOS)
    address = data_address(image, small, quality=82)
    content = element("img", src=address, alt=alt, title=title, class_="pixels" if small else None)
    if link is not None:
        content = element("a", content, href="./" + quote(link))
    figure = element("figure", content, element("figcaption", note))
    return figure, f"--ratio: {size_px[1] / size_px[0]:.3f}"
