"""A walk by keys alone in a real Chromium, from pictures of one's own to a run that has ended.

Wherever the keys come to, the focus is seen; what was pressed leaves it on the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

import browser
import photos
import pytest
import served
import tiny_runs
from browser import Page

from daguerre.queue.runner import Runner
from daguerre.threads import background

pytestmark = [browser.needed, pytest.mark.long]
CARDS = "document.querySelectorAll('#cards article').length"
FOCUS = """(() => {
  const one = document.activeElement, style = getComputedStyle(one), box = one.getBoundingClientRect();
  if (one === document.body) return "nothing has the focus";
  const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
  if (!seen) return `no outline: ${one.outerHTML.slice(0, 100)}`;
  const inside = box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
  return inside ? "" : `out of the window: ${one.outerHTML.slice(0, 100)}`;
})()"""


class Walk:
    """Keys alone; `lost` says where no focus is seen, and each step leaves a picture of the page."""

    def __init__(self, page: Page, pictures: Path) -> None:
        self.page, self.pictures, self.lost, self.steps = page, pictures, list[str](), 0

    def look(self, after: str) -> None:
        """Notes whether the focus is seen, two frames later, when one that was disabled has lost it."""
        self.page.evaluate("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")
        if wrong := self.page.evaluate(FOCUS):
            self.lost.append(f"after {after}: {wrong}")
        self.steps += 1
        self.page.screenshot(self.pictures / f"{self.steps:02}.png")

    def to(self, selector: str, back: bool = False) -> None:
        self.page.tab_to(selector, back)
        self.look(f"Tab to {selector}")

    def write(self, selector: str, text: str) -> None:
        self.to(selector)
        self.page.type(text)

    def press(self, selector: str, then: str, key: str = "Enter", back: bool = False) -> None:
        """Goes to something, presses it, and waits for what it does."""
        self.to(selector, back)
        self.page.key(key)
        self.page.wait(then)
        self.look(f"{key} on {selector}")

    def follow(self, link: str, then: str) -> None:
        """Opens another page, on which nothing has the focus yet."""
        self.to(link)
        self.page.key("Enter")
        self.page.wait(f"document.readyState === 'complete' && {then}")


def said(text: str) -> str:
    return f"document.querySelector('#said').textContent.startsWith('{text}')"


def send_pictures(walk: Walk, home: Path) -> None:
    """A new folder of three pictures; then their captions, as files."""
    page, own = walk.page, home.parent.parent / "own"
    own.mkdir()
    for number, name in enumerate(("one", "two", "three")):
        (own / f"{name}.png").write_bytes(photos.image(64, 48 + number))
        (own / f"{name}.txt").write_text(f"a dog, {name}\n")
    walk.follow("[href='data/']", "document.querySelector('#new')")
    walk.write("#new-name", home.name)
    walk.to("#files")
    page.choose(sorted(own.glob("*.png")))
    page.wait(f"document.querySelector('#cards') && {CARDS} === 3")
    walk.to("#files")
    page.choose(sorted(own.glob("*.txt")))
    page.wait("document.querySelector('#facts').textContent.includes('3 can be trained on')")
    walk.look("captions were sent")
    assert {path.name for path in home.iterdir() if path.is_file()} == {path.name for path in own.iterdir()}


def change_captions(walk: Walk, home: Path) -> None:
    """Find and replace in all of them, and back; then one is left out."""
    page, captions = walk.page, [home / f"{name}.txt" for name in ("one", "two", "three")]
    walk.press("#change", "document.querySelector('#many').open", back=True)
    walk.to("#m-kind")
    page.key("ArrowDown")
    page.wait("document.querySelector('#m-tag').offsetParent")
    page.key("ArrowUp")
    page.wait("document.querySelector('#m-find').offsetParent")
    walk.write("#m-find", "dog")
    walk.write("#m-by", "sks dog")
    page.wait("document.querySelector('#preview').textContent.startsWith('3 captions would change')")
    walk.press("#many [type=submit]", said("3 captions changed"))
    assert [path.read_text() for path in captions] == [f"a sks dog, {path.stem}\n" for path in captions]
    page.wait("!document.querySelector('#undo').hidden")
    walk.press("#undo", f"{said('Undone: 3 captions')} && document.querySelector('#undo').hidden", back=True)
    assert [path.read_text() for path in captions] == [f"a dog, {path.stem}\n" for path in captions]
    walk.press("[data-name='two.png'] .pick", "!document.querySelector('[data-to=left_out]').disabled", key=" ")
    walk.press("[data-to=left_out]", f"{CARDS} === 2", back=True)
    assert (home / ".daguerre" / "left_out" / "two.png").exists()


def start_run(walk: Walk) -> None:
    """A run of eight updates: a mistake is named and mended, the run is checked, queued, and trains."""
    page, name = walk.page, "document.getElementById('set-run_name')"
    given = dict(one.split("=", 1) for one in tiny_runs.TINY)
    walk.follow("[href='../../']", "document.querySelector(\"[href='queue/new']\")")
    walk.follow("[href='queue/new']", "document.querySelectorAll('.setting').length > 200")
    walk.to("#recipe")
    page.key("ArrowDown")
    page.wait("location.search.startsWith('?recipe=quickstart_')")
    page.key("ArrowUp")
    page.wait("location.search === '?recipe=quickstart'")
    text = "\n".join(f"{path}: {value}" for path, value in given.items() if path != "run_name")
    walk.write("#search", "run_name")
    walk.write("#yaml", text)
    page.wait("document.querySelector('#command').textContent.includes('8 steps')")
    walk.to("#set-run_name", back=True)
    page.type("a/b")
    walk.press("#check", f"document.activeElement === {name} && {name}.getAttribute('aria-invalid')")
    assert "no slash" in page.evaluate(f"{name}.closest('.setting').textContent")
    page.key("Tab", shift=True)
    walk.to("#set-run_name")  # selects what is in it
    page.type("mine")
    page.key("Tab")
    page.wait("document.querySelector('#yaml').value.includes('run_name: mine')")
    walk.press("#check", "document.querySelector('#doing').textContent === 'Nothing is wrong.'")
    walk.follow("#add", "location.pathname === '/queue/' && document.querySelector('#running article, #ended article')")
    walk.press("#pause-all", "document.querySelector('#pause-all').textContent.startsWith('Go on')")
    page.wait("document.querySelector('#ended .state.finished')")
    assert page.evaluate("document.querySelector('#running').parentElement.hidden"), "nothing trains"
    walk.follow("#ended h3 a", "document.querySelector('h1').textContent.startsWith('mine')")
    walk.to(".plot")


def test_with_keys_alone_pictures_are_sent_captioned_and_changed_back_and_a_run_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runs, pictures = tmp_path / "runs", tmp_path / "steps"
    runs.mkdir()
    pictures.mkdir()
    queue = served.queue_of(runs)
    own = Runner(queue, [""], (sys.executable, "-m", "daguerre"), say=lambda text: None)
    with (
        browser.opened(tmp_path / "profile") as chromium,
        served.running(runs, control=True) as here,
        background("queue", own.keep_running),
    ):
        walk = Walk(chromium.page(), pictures)
        walk.page.size(1280, 900)
        walk.page.go(here)
        send_pictures(walk, runs / "my_dog")
        change_captions(walk, runs / "my_dog")
        start_run(walk)
        assert walk.lost == []
        assert chromium.errors == []
    (entry,) = queue.entries()
    assert (entry.entry.place, entry.state) == (str(runs / "mine"), "finished")
