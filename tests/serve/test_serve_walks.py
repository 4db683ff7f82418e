"""Walks through the page in a real Chromium: what one looks at stays while a run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import browser
import fake_run
import pytest
import served
from browser import Browser

from daguerre.checkpoint.run_dir import RunFolder
from daguerre.tracking.sinks import MetricsFile

pytestmark = browser.needed


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser.opened(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fake_run.write_run(tmp_path / "quickstart", steps=200, saves=3, state="running")
    fake_run.write_run(tmp_path / "other", steps=100, saves=2)
    return tmp_path


def go_on(run: Path, first: int, last: int) -> None:
    """More updates, with a save at the last."""
    file = MetricsFile(run / "metrics" / "metrics.jsonl")
    for step in range(first, last + 1, 10):
        file.write(step, 32 * step, {"learning/loss": 0.05, "perf/samples_per_second": 300.0})
    file.close()
    fake_run.write_samples(run, last, 1.0)
    fake_run.write_status(run, "running", last)


def test_what_one_looks_at_stays_while_a_run_goes_on(folder: Path, chromium: Browser) -> None:
    page, run = chromium.page(), folder / "quickstart"
    chromium.errors.clear()
    page.size(1280, 900)
    with served.running(folder) as here, RunFolder(run).hold():
        page.go(here)
        page.wait("document.querySelector('.runs .state.running')")
        page.go(here + served.address(folder, "quickstart").lstrip("/"))
        page.wait("document.querySelectorAll('.u-over').length >= 6")
        assert page.evaluate("document.title").startswith("6 % · quickstart")
        # A zoom by dragging, in all charts at once.
        page.evaluate("document.querySelector('.u-over').scrollIntoView({block: 'center'})")
        box = page.evaluate("document.querySelector('.u-over').getBoundingClientRect().toJSON()")
        x, y, width, height = (box[name] for name in ("x", "y", "width", "height"))
        page.mouse("mousePressed", x + width * 0.4, y + height / 2)
        page.mouse("mouseMoved", x + width * 0.5, y + height / 2)
        page.mouse("mouseMoved", x + width * 0.6, y + height / 2)
        page.mouse("mouseReleased", x + width * 0.6, y + height / 2)
        page.wait("!document.querySelector('#whole').hidden")
        zoomed = page.evaluate("daguerreCharts.shownRange()")
        assert all(each == zoomed[0] for each in zoomed)
        assert 60 < zoomed[0][0] < zoomed[0][1] < 140
        # A fold, a place in the config, and a picture that is open.
        page.evaluate("document.querySelector('details#config').open = true")
        page.evaluate("document.querySelector('#config pre').scrollTop = 7")
        page.evaluate("document.querySelector('.strip a').click()")
        page.wait("document.querySelector('.pswp__walk input')")
        page.key("ArrowRight")
        shown = "document.querySelector('.pswp__walk p').textContent"
        page.wait(f"{shown}.startsWith('update 133')")
        where = page.evaluate("scrollY")
        go_on(run, 210, 300)
        page.wait("document.querySelector('[data-part=head]').textContent.includes('9,600')")
        page.wait("document.querySelectorAll('.row:first-child .strip a').length === 4")
        assert page.evaluate(f"{shown}.startsWith('update 133')")
        assert page.evaluate("document.querySelector('.pswp__walk input').max") == "3"
        assert page.evaluate("daguerreCharts.shownRange()") == zoomed
        assert page.evaluate("document.querySelector('details#config').open")
        assert page.evaluate("scrollY") == where
        page.key("Escape")
        page.wait("!document.querySelector('.pswp')")
        page.evaluate("document.querySelector('#whole').click()")
        page.wait("daguerreCharts.shownRange()[0][1] >= 300")
    # The lock is gone, and so is the run, whatever its status says; then the server is gone, too.
    assert chromium.errors == []


@pytest.mark.long
def test_a_run_that_is_killed_is_told_and_a_server_that_is_gone_too(folder: Path, chromium: Browser) -> None:
    page = chromium.page()
    with served.running(folder) as here:
        with RunFolder(folder / "quickstart").hold():
            page.go(here + served.address(folder, "quickstart").lstrip("/"))
            page.wait("document.querySelector('.state.running')")
        page.wait("document.querySelector('.state.interrupted') && document.title.startsWith('Interrupted')")
    page.wait("!document.querySelector('.lost-line').hidden")
    assert page.evaluate("document.querySelector('h1').textContent").startswith("quickstart")


@pytest.mark.long
def test_on_a_phone_a_run_is_found_chosen_compared_and_named(folder: Path, chromium: Browser) -> None:
    page = chromium.page()
    chromium.errors.clear()
    page.size(360, 740, dark=True, mobile=True)
    with served.running(folder, control=True) as here:
        page.go(here)
        page.evaluate("document.querySelector('#filter').value = 'duration=3k'")
        page.evaluate("document.querySelector('#filter').dispatchEvent(new Event('input'))")
        page.wait("document.querySelector('#count').textContent.startsWith('0 runs')")
        page.evaluate("document.querySelector('#filter').value = 'resolution=64'")
        page.evaluate("document.querySelector('#filter').dispatchEvent(new Event('input'))")
        page.wait("document.querySelector('#count').textContent.startsWith('2 runs')")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.evaluate("document.querySelectorAll('.pick').forEach((one) => one.click())")
        page.evaluate("document.querySelector('#compare').click()")
        page.wait("location.pathname.endsWith('/compare') && document.querySelectorAll('.u-over').length > 2")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.wait("document.querySelectorAll('.frame img').length === 2")
        page.key("ArrowLeft")
        page.wait("document.querySelector('#at-text').textContent === '133'")
        page.go(here + served.address(folder, "other").lstrip("/"))
        page.wait("document.querySelectorAll('.u-over').length >= 6")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.evaluate("document.querySelector('#edit').click()")
        page.evaluate("document.querySelector('#own-name').value = '<i>mine</i>'")
        page.evaluate("document.querySelector('#notes form').requestSubmit()")
        page.wait("document.querySelector('h1').textContent.startsWith('<i>mine</i>')")
    assert json.loads((folder / "other" / "page.json").read_text())["name"] == "<i>mine</i>"
    assert [error for error in chromium.errors if "ERR_CONNECTION" not in error] == []
