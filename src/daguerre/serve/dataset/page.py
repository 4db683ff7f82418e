"""The pages about pictures: the list of folders, a folder, and the cards of its pictures."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from daguerre.data import skipped
from daguerre.data.filters.evaluate import FilterResult
from daguerre.data.folder.captions import UNCAPTIONED
from daguerre.data.images import kinds
from daguerre.data.leftovers import HIDDEN
from daguerre.data.tools import statistics
from daguerre.formatting import counted, percent
from daguerre.report import dataset_page
from daguerre.report.dataset_page import BucketRow, Fact, FilterRow
from daguerre.report.facts import STATES
from daguerre.report.html import SMALL_PX, Html, element, join, json_script
from daguerre.serve import pages
from daguerre.serve.dataset import captions, forms
from daguerre.serve.dataset.folders import Place
from daguerre.serve.dataset.listing import FILTERED, Listing, Picture, Shape
from daguerre.serve.dataset.reading import RESOLUTION, RESOLUTIONS, SHAPES, Reader, Reading
from daguerre.unicode import printable

PER_PAGE = 60
SHOWN = {
    "all": "all that are there",
    "captioned": "with a caption",
    "bare": "not trained on",
    "cropped": "cropped by a fifth or more",
    "enlarged": "enlarged",
    "images": "with masks or other images",
    "away": "left out or in the trash",
}
_STYLES = ("data.css", "live.css", "dataset.css")
_MUCH = 0.2
_BARE = (
    "Pictures without a caption are left out: open one to write it, or let a network write them (below). A recipe may "
    "give all of them one text (data.captions.text)."
)


def index(places: Sequence[Place], roots: Sequence[Path], control: bool) -> str:
    """The list of folders."""
    head = join(
        element("nav", element("a", "All runs", href="../"), class_="bar-top"),
        element(
            "header",
            element("p", "Daguerre · pictures", class_="kicker"),
            element("h1", "Pictures"),
            element("p", "Folders that training can read, with the captions of their pictures.", class_="summary"),
        ),
    )
    rows = [_folder(place) for place in places]
    none = element("p", "There are no pictures below ", _joined(roots), ".", class_="summary")
    add = element("p", "Other folders are shown by ", element("code", "daguerre serve --root DIR"), ".", class_="note")
    main = element(
        "main",
        forms.new_folder(roots) if control else None,
        element("div", *rows, class_="folders") if rows else none,
        add,
    )
    scripts = ("dataset-upload.js",) if control else ()
    return pages.page("Pictures · Daguerre", join(head, main), "../", _STYLES, scripts)


def _joined(roots: Sequence[Path]) -> Html:
    each = [element("code", printable(str(root))) for root in roots]
    return join(*(join(", " if i else "", one) for i, one in enumerate(each)))


def _folder(place: Place) -> Html:
    inside = place.below - place.pictures
    covers = (
        element("img", src=f"{place.id}/cover/{i}", alt="", loading="lazy", width=64, height=64)
        for i in range(len(place.covers))
    )
    more = f"{counted(inside, 'picture')} in folders inside it" if inside else ""
    said = " · ".join(filter(None, [counted(place.pictures, "picture") if place.pictures else "", more]))
    return element(
        "a",
        element("span", *covers, class_="covers"),
        element("b", printable(place.name)),
        element("small", said),
        href=f"{place.id}/",
        class_="folder",
    )


def folder(place: Place, readers: Sequence[Reader], roots: Sequence[Path], control: bool) -> str:
    """The page of a folder; what is in it follows."""
    body = join(
        element(
            "nav",
            element("a", "All runs", href="../../"),
            element("a", "Pictures", href="../"),
            element("button", "Undo", type="button", id="undo", hidden=True) if control else None,
            class_="bar-top",
        ),
        element(
            "header",
            element("p", "Daguerre · pictures", class_="kicker"),
            element("h1", printable(place.path.name)),
            element("p", printable(place.name), class_="note") if place.path != place.root else None,
            _warning(readers) if control else None,
        ),
        element(
            "main",
            _way(readers),
            element("div", element("p", "Reading the folder …", class_="summary"), id="facts", aria_live="polite"),
            forms.tools(control, SHOWN),
            element("p", class_="note", id="said", role="status"),
            element("div", id="cards", class_="cards-of"),
            element("nav", class_="pager", id="pager", aria_label="Pages of pictures"),
            forms.more(place, roots[0]) if control else None,
        ),
        forms.viewer(control),
        json_script({"control": control, "per_page": PER_PAGE}, id="about"),
    )
    scripts = ("dataset.js", *(("dataset-edit.js", "dataset-upload.js") if control else ()))
    return pages.page(f"{printable(place.path.name)} · Daguerre", body, "../../", _STYLES, scripts)


def _warning(readers: Sequence[Reader]) -> Html | None:
    """Names the runs of which these captions are a part."""
    own = [each for each in readers if each.may_go_on]
    if not own:
        return None
    listed = (
        element(
            "li",
            element("a", each.name, href=f"../../run/{each.id}/"),
            f" ({STATES.get(each.state, each.state).lower()}, update {each.step:,})",
        )
        for each in own
    )
    return element(
        "div",
        element(
            "p",
            "Runs that read this folder and have not finished. Captions are a part of a run: after an edit, one goes "
            "on with the new texts by ",
            element("code", "allow_change='[data.captions]'"),
            ", else its start is refused. If pictures come or go, that is ",
            element("code", "allow_change='[data]'"),
            ".",
        ),
        element("ul", *listed),
        class_="notice",
    )


def _way(readers: Sequence[Reader]) -> Html:
    """The form for how the folder is read."""
    runs = [element("option", f"as the run {each.name}", value=each.id) for each in readers]
    sizes = (element("option", f"{px} px", value=px, selected=px == RESOLUTION) for px in RESOLUTIONS)
    shapes = (element("option", text, value=name) for name, text in SHAPES.items())
    return element(
        "form",
        element("label", "Read ", element("select", element("option", "as a new run", value=""), *runs, name="as")),
        element("label", "Resolution ", element("select", *sizes, name="resolution")),
        element("label", "Buckets ", element("select", *shapes, name="shapes")),
        class_="tools way",
        id="way",
    )


@dataclass(frozen=True)
class Question:
    """The cards that a page asks for."""

    text: str = ""
    show: str = "all"
    page: int = 0


def answer(listing: Listing, reading: Reading, question: Question, control: bool) -> dict[str, Any]:
    """The facts, and the cards of a page of pictures; with `control` captions are written there."""
    filtered = listing.filtered(reading)
    shapes = listing.shapes(reading, filtered.passes)
    found = [one for one in listing.pictures if _fits(one, shapes.get(one.id), question)]
    last = max(0, math.ceil(len(found) / PER_PAGE) - 1)
    page = min(question.page, last)
    here = found[page * PER_PAGE : (page + 1) * PER_PAGE]
    return {
        "facts": join(*_facts(listing, reading, filtered, control)),
        "cards": join(*(_card(listing, one, shapes.get(one.id), reading) for one in here)),
        "count": f"{counted(len(found), 'picture')}",
        "page": page,
        "pages": last + 1,
        "ids": [one.id for one in found if not one.away],
        "undo": captions.last(listing),
    }


def _fits(one: Picture, shape: Shape | str | None, question: Question) -> bool:
    words = question.text.casefold().split()
    if not all(word in one.caption.casefold() or word in one.path.casefold() for word in words):
        return False
    if question.show == "away":
        return bool(one.away)
    if one.away:
        return False
    known = shape if isinstance(shape, Shape) else None
    return {
        "captioned": bool(one.caption),
        "bare": bool(one.reason) or isinstance(shape, str),
        "cropped": known is not None and known.cropped >= _MUCH,
        "enlarged": known is not None and known.enlarged,
        "images": bool(one.images),
    }.get(question.show, True)


def _facts(listing: Listing, reading: Reading, filtered: FilterResult, control: bool) -> Iterator[Html | None]:
    there = [one for one in listing.pictures if not one.away]
    plan, away = listing.plan(reading, filtered.passes), len(listing.pictures) - len(there)
    lost = len(there) - plan.samples
    clauses = [f"{counted(len(there), 'picture')}", f"{plan.samples:,} can be trained on"]
    clauses += [f"{lost:,} cannot"] if lost else []
    clauses += [f"{away:,} put away"] if away else []
    yield element("p", ", ".join(clauses) + ".", class_="summary")
    if control and any(one.reason == UNCAPTIONED for one in there):
        yield element("p", _BARE, class_="note")
    yield dataset_page.facts([*_figures(listing, plan, there)])
    rows = [BucketRow(u.bucket.width_px, u.bucket.height_px, u.samples, u.cropped, u.enlarged) for u in plan.used]
    buckets = dataset_page.buckets(rows, [])
    if buckets is not None:
        yield element("details", element("summary", f"Buckets ({len(rows)})"), buckets, id="buckets")
    if passed := statistics.passing(reading.settings.filters, listing.index):
        conditions = [FilterRow(each.text, each.alone, each.rest) for each in passed]
        table = dataset_page.filters(conditions, listing.index.count)
        yield element("details", element("summary", f"Filters ({len(conditions)})"), table, id="filters")
    report = skipped.merged(listing.found.skipped, skipped.counted({**filtered.rejected, **plan.dropped}))
    if report:
        title = f"Left out, and notes ({sum(entry['count'] for entry in report.values()):,})"
        yield element("details", element("summary", title), dataset_page.left_out(report), id="reasons")


def _figures(listing: Listing, plan: Any, there: Sequence[Picture]) -> Iterator[Fact]:
    with_caption = sum(bool(one.caption) for one in there)
    yield Fact("With a caption", f"{with_caption:,}", percent(with_caption, len(there)))
    if plan.samples:
        index = listing.index
        width, height = (int(np.median(side)) for side in (index.widths_px[:], index.heights_px[:]))
        yield Fact("Median size", f"{width} x {height}", "pixels")
        yield Fact("Cropped", f"{100 * plan.cropped:.1f} %", "of a picture's pixels, on average")
        yield Fact("Enlarged", f"{plan.enlarged:,}", "smaller than their bucket")
        yield Fact("Buckets", f"{len(plan.used):,}", f"of {len(plan.used) + len(plan.unused):,} have pictures")
    for name in kinds.KINDS:
        if count := sum(name in one.images for one in there):
            word = kinds.KINDS[name].word
            yield Fact(f"With a {word}", f"{count:,}", name if name != word else "")


def _card(listing: Listing, one: Picture, shape: Shape | str | None, reading: Reading) -> Html:
    width, height = listing.size(one)
    if shape == FILTERED:
        shape = listing.failed(one, reading)
    name = printable(one.path.replace(f"{HIDDEN}/{one.away}/", "") if one.away else one.path)
    box = shape.box if isinstance(shape, Shape) else None
    frame = None
    if box is not None and isinstance(shape, Shape) and shape.cropped > 0.002:
        left, top, wide, tall = (f"{100 * share:.2f}%" for share in box)
        frame = element("i", style=f"left:{left};top:{top};width:{wide};height:{tall}")
    image = element(
        "img",
        src=f"picture/{one.id}/small",
        alt=one.caption[:200] or name,
        loading="lazy",
        width=width,
        height=height,
        class_="pixels" if max(width, height) <= SMALL_PX else None,
    )
    reason = one.reason or (shape if isinstance(shape, str) else "")
    link = element(
        "a",
        element("span", image, frame, class_="cut"),
        href=f"picture/{one.id}",
        class_="open",
        data_about=_about(one, shape, width, height),
    )
    return element(
        "article",
        element("input", type="checkbox", class_="pick", value=one.id, aria_label=f"choose {name}"),
        link,
        element("p", one.caption or element("em", "no caption"), class_="words") if one.caption or not reason else None,
        element("p", _sizes(shape, width, height), class_="note") if one.width or reason == UNCAPTIONED else None,
        element("p", reason, class_="wrong") if reason else None,
        element("p", *(element("span", each) for each in one.images), class_="tags") if one.images else None,
        id=f"p-{one.id}",
        data_away=one.away or None,
        data_name=name,
    )


def _about(one: Picture, shape: Shape | str | None, width: int, height: int) -> str:
    """A line about a picture for the viewer."""
    said = [_sizes(shape, width, height)]
    if isinstance(shape, Shape):
        said.append(f"{100 * shape.cropped:.0f} % cropped" if shape.cropped > 0.002 else "nothing cropped")
        said.append("enlarged" if shape.enlarged else "")
    return " · ".join(filter(None, [*said, *(f"with a {name}" for name in one.images)]))


def _sizes(shape: Shape | str | None, width: int, height: int) -> str:
    bucket = f" → {shape.bucket.width_px} x {shape.bucket.height_px}" if isinstance(shape, Shape) else ""
    return f"{width} x {height}{bucket}"
