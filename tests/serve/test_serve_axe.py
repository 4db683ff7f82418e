"""Every page as axe-core sees it, wide and on a phone, light and dark: no serious finding, and nothing overflows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import axe
import browser
import fake_run
import photos
import pytest
import served
from browser import Page

from daguerre.checkpoint.run_dir import RunFolder
from daguerre.serve.dataset.folders import identity
from daguerre.serve.queueing.schema import Schema

pytestmark = [browser.needed, axe.needed]
WIDTHS = {1280: 900, 360: 740}
CURVES = "document.querySelectorAll('.u-over').length > 2"
CARDS = "document.querySelectorAll('#cards article').length === 6"
TOKEN = "a-token-of-many-letters"


@dataclass
class Shown:
    """A server over a folder of runs and pictures, and a page of a browser."""

    page: Page
    folder: Path
    here: str

    def address(self, page: str) -> str:
        """`run:NAME` is the page of a run, `?run:NAME` a word of a query for one, `photos` the folder of pictures."""
        for name in ("quickstart", "broken"):
            place = served.address(self.folder, name).lstrip("/")
            page = page.replace(f"?run:{name}", f"run={place.split('/')[1]}").replace(f"run:{name}/", place)
        return self.here + page.replace("photos", identity((self.folder / "photos").resolve()))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    root = tmp_path_factory.mktemp("axe")
    runs = root / "runs"
    photos.write(runs / "photos")
    fake_run.write_run(runs / "quickstart", steps=200, saves=3, state="running")
    fake_run.write_run(runs / "broken", steps=100, saves=2)
    fake_run.write_status(runs / "broken", "failed", 100, "out of memory")
    for name in ("quickstart", "next"):
        served.queue_of(runs).add([name, "x=1"], str(runs / name), runs / name, runs)
    with pytest.MonkeyPatch.context() as patch, browser.opened(root / "profile") as chromium:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        with served.running(runs, control=True) as here, RunFolder(runs / "quickstart").hold():
            yield Shown(chromium.page(), runs, here)


def check(page: Page, width: int, dark: bool) -> None:
    page.size(width, WIDTHS[width], dark=dark, mobile=width < 600)
    page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))")
    assert axe.serious(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def check_all(page: Page) -> None:
    """Both widths and both themes, with all that can be opened open."""
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    for width in WIDTHS:
        for dark in (False, True):
            check(page, width, dark)


def test_the_queue_and_the_list_are_for_all_people(shown: Shown) -> None:
    page = shown.page
    for address, ready in (("", ".runs .state.running"), ("queue/", ".queue .state.waiting")):
        page.go(shown.here + address)
        page.wait(f"document.querySelector('{ready}')")
        for width, dark in ((1280, False), (360, True)):
            check(page, width, dark)


@pytest.mark.long
@pytest.mark.parametrize(
    ("address", "ready"),
    [
        pytest.param("", "document.querySelector('.runs .state.running')", id="list"),
        pytest.param("run:quickstart/", f"{CURVES} && document.querySelector('.state.running')", id="run"),
        pytest.param("run:broken/", f"{CURVES} && document.querySelector('.notice.failed')", id="failed"),
        pytest.param("run:quickstart/report", "document.querySelector('.chart')", id="report"),
        pytest.param("compare??run:quickstart&?run:broken", CURVES, id="compare"),
        pytest.param("queue/", "document.querySelector('.queue .state.waiting')", id="queue"),
        pytest.param("queue/new?recipe=quickstart", "document.querySelectorAll('.setting').length > 200", id="new"),
        pytest.param("data/", "document.querySelector('.covers img')", id="pictures"),
        pytest.param("data/photos/", CARDS, id="folder"),
    ],
)
def test_every_page_is_for_all_people(shown: Shown, address: str, ready: str) -> None:
    page = shown.page
    if "queue/new" in address:
        Schema().document()  # which the page would wait for, ten seconds and more
    page.go(shown.address(address))
    page.wait(ready)
    check_all(page)


@pytest.mark.long
@pytest.mark.parametrize(
    ("address", "ready", "opens", "dialog"),
    [
        ("run:quickstart/", CURVES, "#edit", "#notes"),
        ("run:quickstart/", CURVES, "[data-action=sample]", "#form-sample"),
        ("run:quickstart/", CURVES, "[data-action=change]", "#form-change"),
        ("run:quickstart/", CURVES, ".strip a", ".pswp"),
        ("data/photos/", CARDS, "[data-name='a.png'] a.open", "#viewer"),
        ("data/photos/", CARDS, "#change", "#many"),
    ],
)
def test_every_dialog_is_for_all_people(shown: Shown, address: str, ready: str, opens: str, dialog: str) -> None:
    page = shown.page
    page.go(shown.address(address))
    page.wait(ready)
    page.wait(f"document.querySelector({opens!r}) && !document.querySelector({opens!r}).disabled")
    page.evaluate(f"document.querySelector({opens!r}).click()")
    page.wait(f"document.querySelector('{dialog}')?.checkVisibility()")
    check_all(page)


@pytest.mark.long
def test_the_login_is_for_all_people(shown: Shown) -> None:
    page = shown.page
    with served.running(shown.folder, token=TOKEN) as here:
        page.go(here)
        page.wait("document.querySelector('input[type=password]')")
        check_all(page)
