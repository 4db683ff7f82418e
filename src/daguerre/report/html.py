"""HTML from Python in which every string is escaped unless it is `Html` already, and whole pages of it.

A page is one file that asks nothing of any network; its policy lets a browser load nothing from outside and run no
script but ours. Knows nothing of runs.
"""

import base64
import hashlib
import io
import json
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

from PIL import Image

from daguerre.unicode import printable

SMALL_PX = 128
"""Longest side of images that are embedded to the pixel and shown with hard edges."""
_HERE = Path(__file__).parent
_VOID = {"img", "br", "input", "line", "path", "circle", "rect"}


class Html(str):
    """Text that is HTML already and goes in as it is."""

    __slots__ = ()


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """`<name attributes>children</name>`. Children that are None are left out, others than `Html` are escaped.

    An attribute that is None or False is left out, True is written as the name alone; `class_` is class, and `_` in
    names becomes `-`.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(key if value is True else f'{key}="{_escaped(value)}"')
    if name in _VOID:
        return Html(f"<{' '.join(parts)}/>")
    return Html(f"<{' '.join(parts)}>{join(*children)}</{name}>")


def join(*children: object) -> Html:
    """Children one after the other, escaped as in `element`."""
    return Html("".join(c if isinstance(c, Html) else _escaped(c) for c in children if c is not None))


def _escaped(value: object) -> str:
    """As HTML; what is no text is written as an escape, so that every page can be written."""
    return escape(printable(str(value)))


def json_script(document: object, **attributes: object) -> Html:
    """A `<script>` that holds JSON, which cannot end the element around it."""
    text = json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
    return element("script", Html(text), type="application/json", **attributes)


def table(head: list[str], rows: list[list[object]], class_: str = "") -> Html:
    """A table; an empty `head` has no header row."""
    header = element("thead", element("tr", *(element("th", cell, scope="col") for cell in head))) if head else None
    body = (element("tr", *(element("td", cell) for cell in row)) for row in rows)
    inner = element("table", header, element("tbody", *body), class_=class_ or None)
    return wide(inner)


def wide(inner: Html) -> Html:
    """A frame that scrolls around something that may be wider than the page; by keys, too, so it takes the focus."""
    return element("div", inner, class_="scroll", tabindex=0)


def is_small(image: Image.Image) -> bool:
    """True for an image that is embedded to the pixel."""
    return max(image.size) <= SMALL_PX


def data_address(image: Image.Image, lossless: bool, quality: int) -> str:
    """A data: URL of an image as PNG if `lossless`, else as WebP of this quality."""
    stream = io.BytesIO()
    if lossless:
        image.save(stream, "PNG", optimize=True)
    else:
        image.save(stream, "WEBP", quality=quality)
    kind = "png" if lossless else "webp"
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"


def render_page(title: str, header: Html, body: Html, of: str, styles: tuple[str, ...], script: str = "") -> str:
    """The page; `of` says in the footer what it was written from. `styles` and `script` are names of files here."""
    code = _asset(script) if script else ""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    allowed = f"'sha256-{digest}'" if code else "'none'"
    now = when(datetime.now(UTC).isoformat())
    return Template(_asset("page.html")).substitute(
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}",
        title=join(title),
        style="".join(map(_asset, styles)),
        script=element("script", Html(code)) if code else "",
        header=header,
        body=body,
        footer=join(f"Written by Daguerre {version('daguerre')} on {now} from {of}."),
    )


def when(text: Any) -> str:
    """An ISO time as people write it, in UTC; "" for anything else."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return ""
    return moment.astimezone(UTC).strftime("%-d %B %Y, %H:%M UTC")


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
