"""Walks through the queue and the form of a new run in a real Chromium."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import browser
import pytest
import served
import tiny_runs
from browser import Browser, Page

from daguerre.queue.queue import Queue
from daguerre.queue.runner import Runner
from daguerre.threads import background

pytestmark = browser.needed
FAKE = (sys.executable, "-S", "-E", str(Path(__file__).parent.parent / "queue" / "fake_training.py"))
ROWS = "[...document.querySelectorAll('#waiting article')].map((one) => one.id.slice(6)).join(' ')"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser.opened(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def put(folder: Path, name: str, what: str = "waits") -> str:
    return served.queue_of(folder).add([name, what, str(folder / name)], str(folder / name), folder / name, folder)


@contextmanager
def starting(queue: Queue, program: tuple[str, ...] = FAKE) -> Iterator[Runner]:
    """What `daguerre serve --control` does next to the page."""
    own = Runner(queue, [""], program, say=lambda text: None)
    with background("queue", own.keep_running):
        yield own
    for each in queue.entries():
        if each.state == "running":
            queue.kill(each)
    for child in own._children:
        child.wait()


def press(page: Page, ident: str, do: str) -> None:
    """A button of an entry; what it asks is answered with yes."""
    page.evaluate("window.confirm = () => true")
    page.evaluate(f"document.querySelector('#entry-{ident} [data-do={do}]').click()")


def wait_until_it_ran(page: Page, folder: Path, name: str) -> None:
    """The queue shows a run as running before its program has begun to work."""
    while not (folder / "ran").exists() or name not in (folder / "ran").read_text().split():
        page.wait("true")


def test_two_are_queued_reordered_by_keys_alone_and_taken_out(folder: Path, chromium: Browser) -> None:
    page, first, second = chromium.page(), put(folder, "a"), put(folder, "b")
    chromium.errors.clear()
    page.size(360, 740, dark=True, mobile=True)
    with served.running(folder, control=True) as here:
        page.go(f"{here}queue/")
        page.wait("document.title.startsWith('0 training, 2 waiting')")
        page.press(f"#entry-{second} [data-do=up]")
        page.wait(f"{ROWS} === '{second} {first}'")
        page.wait(f"document.activeElement.closest('article')?.id === 'entry-{second}'")
        assert [each.ident for each in served.queue_of(folder).entries()] == [second, first]
        page.press("[data-do=pause]")
        page.wait(f"document.querySelector('#entry-{second} .state.paused')")
        page.evaluate("document.querySelector('#pause-all').focus()")
        page.key("Enter")
        page.wait("document.querySelector('#said').textContent.startsWith('The queue is paused')")
        press(page, second, "remove")
        page.wait(f"{ROWS} === '{first}'")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert chromium.errors == []
    page.wait("!document.querySelector('.lost-line').hidden")
    assert page.evaluate(ROWS) == first, "what was shown stays"


@pytest.mark.long
def test_runs_are_stopped_and_killed_and_a_server_that_is_gone_loses_nothing(folder: Path, chromium: Browser) -> None:
    queue, page = served.queue_of(folder), chromium.page()
    first, second, third = (put(folder, name) for name in "abc")
    with served.running(folder, control=True) as here, starting(queue):
        page.go(f"{here}queue/")
        page.wait(f"document.querySelector('#running #entry-{first}')")
        page.wait(f"document.querySelector('#entry-{first} .facts-line a')")
        wait_until_it_ran(page, folder, "a")
        press(page, first, "stop")
        page.wait(f"document.querySelector('#ended #entry-{first} .state.stopped')")
        page.wait(f"document.querySelector('#running #entry-{second}')")
        wait_until_it_ran(page, folder, "b")
        os.kill(queue.document(second, "begun")["training"], signal.SIGKILL)
        page.wait(f"document.querySelector('#ended #entry-{second} .state.interrupted')")
        page.wait(f"document.querySelector('#running #entry-{third}')")
        wait_until_it_ran(page, folder, "c")
        page.go(f"{here}queue/")
        page.wait("document.title.startsWith('1 training, 0 waiting')")
        press(page, first, "resume")
        page.wait(f"document.querySelector('#waiting #entry-{first}')")
    assert (folder / "ran").read_text().split() == ["a", "b", "c"], "nothing ran twice"


@pytest.mark.long  # a training
def test_a_run_is_started_from_the_page_watched_sampled_and_stopped(
    folder: Path, chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    queue, page = served.queue_of(folder), chromium.page()
    chromium.errors.clear()
    page.size(1280, 900)
    given = dict(one.split("=", 1) for one in tiny_runs.TINY) | {
        "training.duration": "20k steps",
        "logging.every": "10 steps",
    }
    given |= {"checkpoint.every": "null", "validation.every": "20k steps"}
    text = "\n".join(f"{path}: {value}" for path, value in given.items() if path != "run_name")
    with served.running(folder, control=True) as here, starting(queue, (sys.executable, "-m", "daguerre")):
        page.go(f"{here}queue/new?recipe=quickstart")
        page.wait("document.querySelectorAll('.setting').length > 200")
        page.evaluate("document.querySelector('#search').value = 'peak learning rate'")
        page.evaluate("document.querySelector('#search').dispatchEvent(new Event('input'))")
        page.wait("/^[1-9][0-9]? settings?$/.test(document.querySelector('#found').textContent)")
        shown = (
            "[...document.querySelectorAll('.setting')].filter((one) => one.offsetParent).map((one) => one.textContent)"
        )
        assert all("eak learning rate" in each for each in page.evaluate(shown)), "the search leaves others out"
        page.evaluate(f"document.querySelector('#yaml').value = {json.dumps(text)}")
        page.evaluate("document.querySelector('#yaml').dispatchEvent(new Event('input'))")
        page.wait("document.querySelector('#command').textContent.includes('20k steps')")
        box = "document.getElementById('set-run_name')"
        page.evaluate(f"{box}.value = 'a/b'; {box}.dispatchEvent(new Event('change', {{bubbles: true}}))")
        page.wait("document.querySelector('#yaml').value.includes('a/b')")
        page.evaluate("document.querySelector('#add').click()")
        page.wait(f"{box}.getAttribute('aria-invalid') && {box}.closest('.setting').textContent.includes('no slash')")
        page.evaluate(f"{box}.value = 'mine'; {box}.dispatchEvent(new Event('change', {{bubbles: true}}))")
        page.wait("document.querySelector('#yaml').value.includes('mine')")
        page.evaluate("document.querySelector('#add').click()")
        page.wait("location.pathname === '/queue/' && document.querySelector('#running article')")
        page.wait("document.querySelector('#running h3 a')")
        page.evaluate("document.querySelector('#running h3 a').click()")
        page.wait("document.querySelector('.state.running') && document.querySelectorAll('.u-over').length > 2")
        page.evaluate("document.querySelector('[data-action=sample]').click()")
        page.evaluate("document.querySelector('#sample-prompts').value = 'a small green star'")
        page.evaluate("document.querySelector('#form-sample form').requestSubmit()")
        page.wait("document.querySelector('#asked img')?.naturalWidth > 0")
        page.evaluate("window.confirm = () => true; document.querySelector('[data-action=stop]').click()")
        page.wait("document.querySelector('.state.saved')")
        page.go(f"{here}queue/")
        page.wait("document.querySelector('#ended .state.stopped')")
    (entry,) = queue.entries()
    assert (entry.entry.place, entry.state) == (str(folder / "mine"), "stopped")
    assert [error for error in chromium.errors if "ERR_CONNECTION" not in error] == []
