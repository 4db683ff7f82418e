"""Walks through the pages about pictures in a real Chromium: sent, captioned, changed back, left out and restored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import browser
import photos
import pytest
import served
from browser import Browser, Page

from daguerre.serve.dataset.folders import identity

pytestmark = browser.needed
CARDS = "document.querySelectorAll('#cards article').length"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser.opened(tmp_path_factory.mktemp("profile")) as found:
        found.errors.clear()
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return photos.write(tmp_path / "runs" / "photos")


def of(folder: Path) -> str:
    return f"data/{identity(folder.resolve())}/"


def fill(page: Page, selector: str, text: str) -> None:
    page.evaluate(f"document.querySelector({selector!r}).value = {text!r}")
    page.evaluate(f"document.querySelector({selector!r}).dispatchEvent(new Event('input', {{bubbles: true}}))")


def click(page: Page, selector: str) -> None:
    page.wait(f"document.querySelector({selector!r}) && !document.querySelector({selector!r}).disabled")
    page.evaluate(f"document.querySelector({selector!r}).click()")


def choose_files(page: Page, paths: list[Path]) -> None:
    root = page.send("DOM.getDocument")["root"]["nodeId"]
    node = page.send("DOM.querySelector", nodeId=root, selector="#files")["nodeId"]
    page.send("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])


def test_pictures_are_sent_captioned_changed_back_left_out_and_restored(tmp_path: Path, chromium: Browser) -> None:
    (tmp_path / "runs").mkdir()
    own = [tmp_path / f"{name}.png" for name in ("one", "two", "three")]
    for number, path in enumerate(own):
        path.write_bytes(photos.image(64, 48 + number))
    page, home = chromium.page(), tmp_path / "runs" / "my_dog"
    page.size(1280, 900)
    with served.running(tmp_path / "runs", control=True) as here:
        page.go(here)
        page.evaluate("[...document.querySelectorAll('a')].find((one) => one.textContent === 'Pictures').click()")
        page.wait("document.querySelector('#new') && document.readyState === 'complete'")
        fill(page, "#new-name", "my_dog")
        choose_files(page, own)
        page.wait(f"document.querySelector('#cards') && {CARDS} === 3")
        assert {path.name for path in home.iterdir()} == {"one.png", "two.png", "three.png"}
        for name in ("one", "three", "two"):  # as they are sorted
            click(page, f"[data-name='{name}.png'] a.open")
            page.wait(f"document.querySelector('#v-name').textContent === '{name}.png'")
            page.wait("!document.querySelector('#v-text').readOnly")
            fill(page, "#v-text", f"a dog, {name}")
            click(page, "#viewer [type=submit]")
            page.wait("document.querySelector('#v-said').textContent.startsWith('saved')")
            click(page, "#viewer .cancel")
        page.wait("document.querySelector('#facts').textContent.includes('3 can be trained on')")
        click(page, "#change")
        fill(page, "#m-find", "dog")
        fill(page, "#m-by", "sks dog")
        page.wait("document.querySelector('#preview').textContent.startsWith('3 captions would change')")
        click(page, "#many [type=submit]")
        page.wait("document.querySelector('#said').textContent.startsWith('3 captions changed')")
        assert (home / "two.txt").read_text() == "a sks dog, two\n"
        click(page, "#undo")
        page.wait("document.querySelector('#said').textContent.startsWith('Undone: 3 captions')")
        assert (home / "two.txt").read_text() == "a dog, two\n"
        click(page, "[data-name='two.png'] .pick")
        click(page, "[data-to=left_out]")
        page.wait(f"{CARDS} === 2")
        assert not (home / "two.png").exists()
        page.evaluate("document.querySelector('#show').value = 'away'")
        page.evaluate("document.querySelector('#show').dispatchEvent(new Event('change'))")
        page.wait(f"{CARDS} === 1")
        click(page, "#cards .pick")
        click(page, "[data-to=back]")
        page.wait("document.querySelector('#said').textContent.startsWith('1 picture restored')")
        assert (home / "two.png").read_bytes() == own[1].read_bytes()
        assert (home / "two.txt").read_text() == "a dog, two\n"
    assert [error for error in chromium.errors if "ERR_CONNECTION" not in error] == []


@pytest.mark.long
def test_a_file_that_is_no_picture_is_named_and_the_others_are_kept(folder: Path, chromium: Browser) -> None:
    page, strange = chromium.page(), folder.parent.parent / "page.html"
    strange.write_text("<script>alert(1)</script>")
    (folder.parent.parent / "g.png").write_bytes(photos.image(96, 64, "green"))
    with served.running(folder.parent, control=True) as here:
        page.go(here + of(folder))
        page.wait(f"{CARDS} === 6")
        choose_files(page, [strange, folder.parent.parent / "g.png"])
        page.wait(f"{CARDS} === 7")
        assert "page.html: not an image" in page.evaluate("document.querySelector('#refused').textContent")
        assert page.evaluate("document.querySelector('#sent-text').textContent") == "1 of 2 files are there."


@pytest.mark.long
def test_on_a_phone_nothing_overflows(folder: Path, chromium: Browser) -> None:
    (folder / "a.txt").write_text("x" * 300)
    page = chromium.page()
    page.size(360, 740, dark=True, mobile=True)
    overflow = "document.documentElement.scrollWidth"
    with served.running(folder.parent, control=True) as here:
        page.go(f"{here}data/")
        page.wait("document.querySelector('.covers img')")
        assert page.evaluate(overflow) <= 360
        page.go(here + of(folder))
        page.wait(f"{CARDS} === 6")
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert page.evaluate(overflow) <= 360
        for opens, dialog in (("[data-name='a.png'] a.open", "#viewer"), ("#change", "#many")):
            click(page, opens)
            page.wait(f"document.querySelector('{dialog}').open")
            assert page.evaluate(f"document.querySelector('{dialog}').scrollWidth") <= 360
            click(page, f"{dialog} .cancel")


@pytest.mark.long
def test_with_the_keyboard_alone_a_caption_is_changed_and_a_picture_left_out(folder: Path, chromium: Browser) -> None:
    page = chromium.page()
    with served.running(folder.parent, control=True) as here:
        page.go(here + of(folder))
        page.wait(f"{CARDS} === 6")
        page.press("[data-name='b.png'] a.open")
        page.wait("document.querySelector('#viewer').open && !document.querySelector('#v-text').readOnly")
        page.tab_to("#v-text")
        page.wait("document.querySelector('#v-text').value === 'a dog, grass, sun'")
        page.type(", noon")
        page.press("#viewer [type=submit]")
        page.wait("document.querySelector('#v-said').textContent.startsWith('saved')")
        assert (folder / "b.txt").read_text() == "a dog, grass, sun, noon\n"
        page.key("Escape")
        page.wait("!document.querySelector('#viewer').open")
        page.wait("document.activeElement.matches(\"[data-name='b.png'] a.open\")")
        page.tab_to("[data-name='d.jpg'] .pick")
        page.key(" ")
        page.evaluate("document.querySelector('#filter').focus()")
        page.press("[data-to=left_out]")
        page.wait(f"{CARDS} === 5")
    assert (folder / ".daguerre" / "left_out" / "d.jpg").exists()
    assert (folder / "metadata.jsonl").read_text() == ""
