"""The page about two evaluations that were compared: each number of both, and the interval of its difference.

All text is escaped. Knows nothing of how the numbers came to be.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from daguerre.report.html import Html, element, join, render_page, table

_WIDTH_PX, _HEIGHT_PX = 180, 14


class Compared(NamedTuple):
    """A number of both evaluations."""

    name: str
    first: str
    second: str
    difference: str
    verdict: str
    low: float | None
    """Interval of the difference, where there is one."""
    high: float | None


def render(
    names: tuple[str, str],
    what: str,
    tables: Mapping[str, Sequence[Compared]],
    warnings: Mapping[str, str],
    note: str,
) -> str:
    """The page; `tables` and `warnings` about their numbers by the names of the tables."""
    header = join(
        element("p", "Daguerre · comparison of evaluations", class_="kicker"),
        element("h1", "A and B"),
        element("p", what, class_="summary"),
        table([], [["A", element("code", names[0])], ["B", element("code", names[1])]], "plain"),
    )
    sections = (
        element(
            "section",
            element("h2", name),
            table(_HEAD, [_row(one) for one in rows], "counts cards compared"),
            element("p", warnings[name], class_="note") if name in warnings else None,
        )
        for name, rows in tables.items()
    )
    body = join(*sections, element("p", note, class_="note"))
    return render_page("A and B · Daguerre", header, body, "the results of daguerre evaluate", ("style.css",))


_HEAD = ["Number", "A", "B", "B - A", "Interval around 0", ""]


def _row(one: Compared) -> list[object]:
    return [one.name, one.first, one.second, one.difference, _bar(one.low, one.high), one.verdict]


def _bar(low: float | None, high: float | None) -> Html | str:
    """The interval next to a line at 0; nothing without an interval."""
    if low is None or high is None:
        return ""
    middle, reach = _WIDTH_PX / 2, max(abs(low), abs(high), 1e-300)
    ends = [middle + 0.95 * middle * value / reach for value in (low, high)]
    zero = element("line", x1=middle, x2=middle, y1=0, y2=_HEIGHT_PX, stroke="currentColor", stroke_opacity=0.4)
    y = _HEIGHT_PX / 2
    bar = element("line", x1=ends[0], x2=ends[1], y1=y, y2=y, stroke="var(--high)", stroke_width=4)
    label = f"{low:+.4g} to {high:+.4g}"
    size = {"width": _WIDTH_PX, "height": _HEIGHT_PX, "viewBox": f"0 0 {_WIDTH_PX} {_HEIGHT_PX}"}
    return element("svg", zero, bar, role="img", aria_label=label, **size)
