"""The page of a comparison stands alone, is sound HTML, and lets no text become markup."""

from __future__ import annotations

from test_page import HOSTILE, Page

from daguerre.report.comparison import Compared, render


def test_a_comparison_shows_each_number_and_its_interval():
    rows = [
        Compared("fid", "9.1", "8.2", "-0.9 (-1.2 to -0.6)", "B is better", -1.2, -0.6),
        Compared(HOSTILE, "0", "0", "0", "no clear difference", 0.0, 0.0),
    ]
    page = Page(
        render(
            (HOSTILE, "runs/b"), "16 images each", {"fid-inception": rows}, {"fid-inception": HOSTILE}, "95 % intervals"
        )
    )
    assert not page.scripts
    assert page.words().count("<script>alert(1)</script>") == 3
    assert "fid 9.1 8.2 -0.9 (-1.2 to -0.6) B is better" in page.words()
    bars = [attributes for tag, attributes in page.tags if tag == "line" and attributes["stroke"] == "var(--high)"]
    ends = [(float(bar["x1"] or 0), float(bar["x2"] or 0)) for bar in bars]
    assert ends[0][0] < ends[0][1] < 90, "left of the line at 0"
    assert ends[1] == (90, 90)
