"""The page of a data set stands alone, is sound HTML, and lets no text of the data become markup."""

from __future__ import annotations

import pytest
from test_page import HOSTILE, LINKS, Page

from daguerre.formatting import percent
from daguerre.report.dataset_page import BucketRow, Example, Fact, FilterRow, Part, render
from daguerre.report.svg import Histogram, Mark, histogram


def part(**changes: object) -> Part:
    values = {
        "name": "",
        "samples": 100,
        "summary": f"100 samples {HOSTILE}",
        "facts": [Fact("Usable", "90", HOSTILE)],
        "histograms": [Histogram("Shorter side", "px", [1, 2, 4], [3, 4], [1, 0], True, [Mark(2, HOSTILE), Mark(3)])],
        "buckets": [BucketRow(64, 128, 60, 0.25, 0), BucketRow(128, 64, 30, None, 7)],
        "unused_buckets": ["64x64"],
        "filters": [FilterRow(f"a > 1 {HOSTILE}", 95, 95), FilterRow("b > 1", 94, 90)],
        "left_out": {f"reason {HOSTILE}": {"count": 10, "examples": [HOSTILE, "x"], "kept": False}},
        "metadata": [(HOSTILE, "100 %", HOSTILE)],
        "examples": [Example(b"\xff\xd8jpeg", (40, 30), (0.125, 0.0, 0.75, 1.0), HOSTILE, "40 x 30")],
        "notes": [HOSTILE],
    }
    return Part(**{**values, **changes})  # type: ignore[arg-type]


def page(*parts: Part, title: str = HOSTILE) -> Page:
    return Page(render(title, HOSTILE, parts, f"data: {HOSTILE}\n"))


def test_text_of_the_data_is_text() -> None:
    found = page(part())
    assert not found.scripts
    assert found.words().count("<script>alert(1)</script>") >= 10
    for tag, attributes in found.tags:
        assert tag not in {"script", "iframe", "object", "embed", "form", "link"}
        assert not [name for name in attributes if name.startswith("on")]
        for name in LINKS & attributes.keys():
            assert str(attributes[name]).startswith("data:image/jpeg;base64,")


def test_a_browser_may_load_and_run_nothing() -> None:
    policy = dict(next(attributes for tag, attributes in page(part()).tags if "http-equiv" in attributes))["content"]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "script-src 'none'" in policy
    assert "img-src data:" in policy


def test_what_it_says() -> None:
    words = page(part(), title="my images").words()
    for said in ("my images", "64 x 128", "25.0 %", "not known", "7 (23", "Without images: 64x64", "left out"):
        assert said in words
    assert "With those above" in words


def test_what_is_not_there_has_no_section() -> None:
    bare = page(part(histograms=[], buckets=[], filters=[], left_out={}, metadata=[], examples=[], facts=[]))
    titles = bare.words()
    for title in ("Examples", "Buckets", "Filters", "Metadata", "Sizes"):
        assert title not in titles
    assert "Nothing." in titles


def test_several_sources_stand_below_each_other() -> None:
    words = page(part(name="my photos"), part(name="my art")).words()
    assert words.index("my photos") < words.index("my art")
    assert words.count("Buckets") == 2


def test_many_buckets_are_cut_to_the_fullest() -> None:
    rows = [BucketRow(8 * i, 64, i, 0.1, 0) for i in range(1, 90)]
    words = page(part(buckets=rows)).words()
    assert "The 60 fullest of 89 buckets in use." in words
    assert "712 x 64" in words
    assert " 8 x 64" not in words


@pytest.mark.parametrize(
    ("share", "text"),
    [
        ((0, 10), "0 %"),
        ((10, 10), "100 %"),
        ((1, 10_000), "under 0.1 %"),
        ((9_999, 10_000), "over 99.9 %"),
        ((1, 3), "33 %"),
        ((1, 40), "2.5 %"),
        ((0, 0), "0 %"),
    ],
)
def test_shares(share: tuple[int, int], text: str) -> None:
    assert percent(*share).replace("\N{NO-BREAK SPACE}", " ") == text


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("kept", [[0, 0, 0], [1, 0, 0], [5, 10**7, 3]])
def test_histograms_of_any_counts_are_sound(log: bool, kept: list[int]) -> None:
    figure = histogram(Histogram("t", "u", [1.0, 2.0, 4.0, 8.0], kept, [], log, [Mark(100, "outside")]))
    found = Page(str(figure))
    assert "outside" not in found.words()
    assert sum(attributes.get("class") == "kept" for _, attributes in found.tags) == sum(count > 0 for count in kept)
    for _, attributes in found.tags:
        assert float(attributes.get("height") or 1) > 0
        assert float(attributes.get("width") or 1) > 0
