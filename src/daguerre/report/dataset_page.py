"""The page about a data set, from figures counted elsewhere: one HTML page that needs nothing else.

All text from the data is escaped. Knows nothing of sources or indexes.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daguerre.formatting import percent
from daguerre.report.html import Html, element, join, render_page, table
from daguerre.report.svg import Histogram, histogram

MANY_BUCKETS = 60
_ICON_PX = 30


@dataclass(frozen=True)
class Fact:
    """A key figure."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Example:
    """An image with its caption."""

    jpeg: bytes
    size_px: tuple[int, int]
    """Width and height of the JPEG."""
    box: tuple[float, float, float, float]
    """The crop that is trained on: left, top, width, height as shares of the image."""
    caption: str
    note: str


@dataclass(frozen=True)
class BucketRow:
    """A line of the bucket plan."""

    width_px: int
    height_px: int
    samples: int
    cropped: float | None
    enlarged: int


@dataclass(frozen=True)
class FilterRow:
    """A condition: how many pass it alone, and how many pass it and all before it."""

    text: str
    alone: int
    rest: int


@dataclass(frozen=True)
class Part:
    """Facts about one source."""

    name: str
    """Empty where there is only one."""
    samples: int
    summary: str
    facts: Sequence[Fact]
    histograms: Sequence[Histogram]
    buckets: Sequence[BucketRow]
    unused_buckets: Sequence[str]
    filters: Sequence[FilterRow]
    left_out: Mapping[str, Mapping[str, Any]]
    metadata: Sequence[Sequence[str]]
    """Rows of name, share of the samples that have it, and a summary of its values."""
    examples: Sequence[Example]
    notes: Sequence[str] = ()


def render(title: str, what: str, parts: Sequence[Part], settings: str) -> str:
    """The page; `settings` is the data section as YAML."""
    header = join(
        element("p", "Daguerre · data set", class_="kicker"),
        element("h1", title),
        element("p", what, class_="note") if what != title else None,
    )
    several = len(parts) > 1
    details = element(
        "section", element("details", element("summary", "Settings"), element("pre", settings, tabindex=0))
    )
    body = join(*(_part(part, several) for part in parts), details)
    return render_page(f"{title} · Daguerre", header, body, "the data", ("style.css", "data.css"))


def _part(part: Part, several: bool) -> Html:
    head = [element("h2", part.name, class_="source")] if several else []
    figures = [histogram(one) for one in part.histograms]
    found = [
        ("Examples", _examples(part.examples)),
        ("Sizes, shapes and captions", element("div", *figures, class_="charts") if figures else None),
        ("Buckets", buckets(part.buckets, part.unused_buckets)),
        ("Filters", filters(part.filters, part.samples) if part.filters else None),
        ("Left out", left_out(part.left_out)),
        ("Metadata", _metadata(part)),
    ]
    level = "h3" if several else "h2"
    sections = (element("section", element(level, title), inner) for title, inner in found if inner is not None)
    return join(
        *head,
        element("p", part.summary, class_="summary"),
        *(element("p", note, class_="note") for note in part.notes),
        facts(part.facts),
        *sections,
    )


def facts(figures: Sequence[Fact]) -> Html:
    """Key figures, large."""
    cells = (
        element("div", element("dt", fact.name), element("dd", fact.value, fact.note and element("small", fact.note)))
        for fact in figures
    )
    return element("dl", *cells, class_="facts")


def _examples(examples: Sequence[Example]) -> Html | None:
    if not examples:
        return None
    lead = "A random choice. The bright part is trained on; the dark part is cropped away."
    return join(element("p", lead, class_="note"), element("div", *map(_example, examples), class_="wall"))


def _example(example: Example) -> Html:
    address = f"data:image/jpeg;base64,{base64.b64encode(example.jpeg).decode()}"
    width, height = example.size_px
    left, top, wide, tall = (f"{100 * share:.2f}%" for share in example.box)
    frame = element("i", style=f"left:{left};top:{top};width:{wide};height:{tall}")
    image = element("img", src=address, alt=example.caption, width=width, height=height, loading="lazy")
    words = element("span", example.caption or element("em", "no caption"))
    caption = element("figcaption", words, element("small", example.note))
    style = f"flex-grow:{width / height:.3f};flex-basis:{190 * width / height:.0f}px"
    return element("figure", element("div", image, frame, class_="cut"), caption, style=style)


def buckets(used: Sequence[BucketRow], unused: Sequence[str]) -> Html | None:
    """The bucket plan; None without a bucket in use."""
    if not used:
        return None
    most = max(row.samples for row in used)
    shown = sorted(used, key=lambda row: -row.samples)[:MANY_BUCKETS]
    largest = max(max(row.width_px, row.height_px) for row in shown)
    usable = sum(row.samples for row in used)
    rows = [_bucket(row, usable, most, largest) for row in used if row in shown]
    notes = []
    if len(shown) < len(used):
        notes.append(f"The {MANY_BUCKETS} fullest of {len(used)} buckets in use.")
    if unused:
        listed = ", ".join(unused[:12]) + (", ..." if len(unused) > 12 else "")
        notes.append(f"Without images: {listed}.")
    notes.append("Cropped: mean share of an image's pixels that are cropped away.")
    head = ["", "Width x height", "Images", "", "Cropped", "Enlarged"]
    return join(table(head, rows, "buckets"), element("p", " ".join(notes), class_="note below"))


def _bucket(row: BucketRow, samples: int, most: int, largest: int) -> list[object]:
    width, height = (max(2, round(_ICON_PX * side / largest)) for side in (row.width_px, row.height_px))
    icon = element("i", class_="shape", style=f"width:{width}px;height:{height}px")
    bar = _fill_bar(row.samples / most)
    enlarged = f"{row.enlarged:,} ({percent(row.enlarged, row.samples)})" if row.enlarged else "none"
    cropped = "not known" if row.cropped is None else f"{100 * row.cropped:.1f} %"
    size = element("b", f"{row.width_px} x {row.height_px}")
    return [icon, size, f"{row.samples:,} ({percent(row.samples, samples)})", bar, cropped, enlarged]


def _fill_bar(share: float) -> Html:
    return element("div", element("i", class_="fill", style=f"width:{100 * share:.1f}%"), class_="bar")


def filters(conditions: Sequence[FilterRow], samples: int) -> Html:
    """The conditions of the filters, in their order, and how many samples pass."""
    rows: list[list[object]] = []
    for number, row in enumerate(conditions):
        bar = _fill_bar(row.rest / max(1, samples))
        alone = f"{row.alone:,} ({percent(row.alone, samples)})"
        rest = f"{row.rest:,} ({percent(row.rest, samples)})"
        rows.append([element("code", row.text), alone, rest if number else "", bar])
    return table(["Condition", "Passed by", "With those above", ""], rows, "filters")


def left_out(report: Mapping[str, Mapping[str, Any]]) -> Html:
    """Counts of samples that are left out, or worth a note, by reason."""
    if not report:
        return element("p", "Nothing.", class_="note")
    rows: list[list[object]] = []
    for reason, entry in report.items():
        treated = "trained on all the same" if entry.get("kept") else "left out"
        examples = join(*(element("code", example) for example in entry["examples"][:5]))
        rows.append([reason, treated, f"{entry['count']:,}", examples])
    return table(["Reason", "", "Count", "Such as"], rows, "counts reasons")


def _metadata(part: Part) -> Html | None:
    if not part.metadata:
        return None
    rows: list[list[object]] = [[element("code", name), there, said] for name, there, said in part.metadata]
    return table(["Field", "There in", "Values"], rows, "plain metadata")
