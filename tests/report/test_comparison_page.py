"""The page of a comparison stands alone, is sound HTML, and lets no text become markup."""

from __future__ import annotations

import json
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest
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


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width_px", [390, 820, 1120])
def test_nothing_of_it_is_beyond_the_edge_of_a_phone_or_a_screen(width_px: int, tmp_path: Path):
    place = "/home/someone/projects/diffusion/runs/{}/evaluations/step-00020000/64-images-guidance-7.5-a1b2"
    rows = [
        Compared("averaged at 0.1", "0.0134567", "0.0134999", "+4.32e-05 (-1.2e-05 to +9.8e-05)", long, -1.2e-5, 9.8e-5)
        for long in ("no clear difference", "differ, and too few images to say which is better")
    ]
    rows.append(Compared("standard_deviation", "0.00123457", "0.00121", "-2.457e-05", "no interval", None, None))
    text = render((place.format("a" * 60), place.format("b")), "64 images each", {"kid": rows}, {"kid": "few"}, "95 %")
    # A frame, as a browser's window has a least width. The page's own policy lets no script run in it.
    measure = """onload = () => {
        const of = document.querySelector("iframe").contentDocument
        const boxes = [of.documentElement, ...of.querySelectorAll(".scroll")]
        const verdict = of.querySelector(".compared td:last-child").getBoundingClientRect()
        const beyond = boxes.filter(one => one.scrollWidth > one.clientWidth).length
        document.body.textContent = JSON.stringify({beyond, boxes: boxes.length, right: verdict.right})
    }"""
    frame = f'<iframe style="width:{width_px}px;height:2000px;border:0" srcdoc="{escape(text)}"></iframe>'
    outer = tmp_path / "outer.html"
    outer.write_text(f"<!DOCTYPE html><body>{frame}<script>{measure}</script></body>", encoding="utf-8")
    options = "--headless --no-sandbox --disable-gpu --disable-background-networking --window-size=1400,2400 --dump-dom"
    command = ["chromium", *options.split(), f"--user-data-dir={tmp_path / 'profile'}", outer.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout.partition("<body>")[2].partition("</body>")[0])
    assert found["boxes"] == 3
    assert found["beyond"] == 0
    assert 0 < found["right"] <= width_px
