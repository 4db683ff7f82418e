"""HTML from Python in which every string is escaped unless it is `Html` already. Knows nothing of runs."""

from __future__ import annotations

from html import escape

from daguerre.unicode import printable


class Html(str):
    """Text that is HTML already and goes in as it is."""

    __slots__ = ()


_VOID = {"img", "br", "line", "path", "circle", "rect"}


def element(name: str, *children: object, **attributes: object) -> Html:
    """`<name attributes>children</name>`. Children that are None are left out, others than `Html` are escaped.

    An attribute that is None or False is left out, True stands alone; `class_` is class, and `_` in names becomes `-`.
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


def table(head: list[str], rows: list[list[object]], class_: str = "") -> Html:
    """A table; an empty `head` has no header row."""
    header = element("thead", element("tr", *(element("th", cell, scope="col") for cell in head))) if head else None
    body = (element("tr", *(element("td", cell) for cell in row)) for row in rows)
    inner = element("table", header, element("tbody", *body), class_=class_ or None)
    return element("div", inner, class_="scroll")
